"""One module a grammar library, to compile constraints to grammars and load them as matchers."""
