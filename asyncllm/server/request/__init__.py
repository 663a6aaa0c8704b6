"""Converts request bodies to arguments of the engine, for the routes of every API."""
