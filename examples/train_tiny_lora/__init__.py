"""The bundled adapter ``tiny-lora``: tiny-chat in capital letters."""
