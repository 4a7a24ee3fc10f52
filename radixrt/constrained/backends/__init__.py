"""One module for each grammar library. Each compiles a constraint to a Grammar and loads a Grammar
as a Matcher."""
