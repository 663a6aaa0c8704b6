"""The HTTP server, thin over `AsyncEngine`: OpenAI's routes and LMDeploy's, on aiohttp."""
