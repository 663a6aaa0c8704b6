"""Turns the body of a request into arguments of the engine, for the routes of every API."""
