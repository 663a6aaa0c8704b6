"""SGLang's form of /generate."""
