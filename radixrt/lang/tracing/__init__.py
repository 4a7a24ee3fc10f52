"""How does one look at what a program did? As a timeline: a page, or text."""
