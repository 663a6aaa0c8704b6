"""Connections, bodies, access, and the writing of answers and errors."""
