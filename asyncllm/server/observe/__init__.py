"""What tells how the server does: metrics, health, the access log."""
