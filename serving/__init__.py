"""How clients reach the engine: today the command line."""
