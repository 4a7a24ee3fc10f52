"""What looking up, growing, locking and evicting cost in the radix tree, beside two published designs."""
