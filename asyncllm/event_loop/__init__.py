"""Asyncio helpers that engine, server and pipeline share: where they may run, and how their work takes turns."""
