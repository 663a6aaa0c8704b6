"""Connections and bodies, who may call, and how an answer or an error is written."""
