from tests.brokers import broker

__all__ = ["broker"]
