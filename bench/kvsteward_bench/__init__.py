"""Evidence: traffic, measurements and the demo's story, against any OpenAI-compatible endpoint.

Talks to the other parts over the network only, as a user would; imports none of them but contract/.
"""
