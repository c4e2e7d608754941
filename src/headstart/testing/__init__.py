"""For tests, simulators and authors of engines. Nothing else in headstart imports it."""
