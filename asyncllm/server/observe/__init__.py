"""Observing the server: metrics, health, the access log."""
