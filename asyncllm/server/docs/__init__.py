"""The server's documentation of itself: the OpenAPI document and the page at /."""
