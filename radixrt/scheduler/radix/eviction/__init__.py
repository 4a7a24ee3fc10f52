"""Which unlocked leaf of the radix tree goes first? One small class a policy, all behind one interface."""
