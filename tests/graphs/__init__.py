"""Small graphs for tests of the runtime: no weights, actors scripted by the text that enters."""
