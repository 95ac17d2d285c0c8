from titogym.errors import UserError


def command() -> None:
    raise UserError("not built yet")
