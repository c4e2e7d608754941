"""Models by their name: which files a name means, where they are, and how they come here. In reading order: `reference`,
`quantization`, `variants`, `folders`, `finders`, `names`; `client`, `cache`, `download`, `pull`.

Finding a model needs no network and loads neither an engine nor the hub's client.
"""
