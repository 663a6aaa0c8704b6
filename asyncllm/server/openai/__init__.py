"""OpenAI's routes: their bodies, their answers, their streams."""
