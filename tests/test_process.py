import platform

from transformer_xl.process import keep_freed_memory


def test_only_glibc_is_told():
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")


def test_other_c_libraries_are_left_alone(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not keep_freed_memory()
