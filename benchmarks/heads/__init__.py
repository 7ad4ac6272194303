"""Ten models' heads by numbers of tokens and inputs."""
