"""The link: views from the bridge to the extenders, claims from the extenders to the bridge.

gRPC over TCP with mutual TLS, or over a unix socket. The server is in the bridge and speaks only
while it leads; clients find the leader by themselves. No decision is taken here.
"""
