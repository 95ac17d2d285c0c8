from titogym.cli.main import app

app()
