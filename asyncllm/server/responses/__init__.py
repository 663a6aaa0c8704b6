"""OpenAI's Responses API over the same engine."""
