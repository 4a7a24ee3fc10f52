"""A file for each library that turns a constraint into token masks. Each compiles to a Grammar and loads it again."""
