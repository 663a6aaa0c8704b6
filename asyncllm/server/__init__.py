"""The HTTP server, a thin aiohttp layer over `AsyncEngine`: the OpenAI, LMDeploy, Anthropic and Ollama APIs."""
