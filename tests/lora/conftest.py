from tests.download.fixtures import running, stand_in

__all__ = ["running", "stand_in"]  # fixtures
