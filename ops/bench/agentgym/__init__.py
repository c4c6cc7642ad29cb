"""The real AgentGym against ours, both ways: its client on our servers, ours on its servers.

Not part of `horizonrl bench`: it needs a checkout of AgentGym, and a Python that has what its servers need.
"""
