"""OpenAI's routes: request bodies, response bodies and streams."""
