"""From the body of a request to what the engine is asked, whichever API's route it came by."""
