"""What engine, server and pipeline share of asyncio: where they may run, and how their work takes turns."""
