"""How clients reach the engine: the command line, HTTP."""
