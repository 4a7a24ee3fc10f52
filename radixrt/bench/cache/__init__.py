"""``radixrt bench cache``: what do eviction policy, queue order and pool size do to recorded traffic?"""
