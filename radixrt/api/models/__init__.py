"""Several models behind one api process: loads and unloads them, and hands requests on to theirs."""
