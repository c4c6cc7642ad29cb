"""The transport on NATS JetStream: connections, streams, accounts, keys, the embedded server. Alone imports nats."""
