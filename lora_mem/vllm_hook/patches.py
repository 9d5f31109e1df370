"""One registry for every change to someone else's object: it chains, tells who is where, and leaves others' alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

_LOOKED_AT = 1000  # functions at most, in search of ours inside of theirs


class Patch:
    """One function of ours in front of someone else's.

    Args:
        owner: a class, which must define the function itself, or an instance.
        name: of the function.
        replacement: called as `replacement(original, *args, **kwargs)`; for a class, `args` begin with the instance.

    Attributes:
        function: what the owner was given; while it is not `active` it only passes calls on, as it must where someone
            holds on to it.
    """

    def __init__(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        self.owner = owner
        self.name = name
        self._before = vars(owner).get(name)
        # What an instance has from its class is looked up at each call: the class may be patched later.
        original = self._before or (lambda *args, **kwargs: getattr(type(owner), name)(owner, *args, **kwargs))
        ours: Callable[..., Any] = functools.partial(replacement, original)
        runs = ours

        @functools.wraps(getattr(owner, name))
        def function(*args: Any, **kwargs: Any) -> Any:
            return runs(*args, **kwargs)

        def switch(on: bool) -> None:
            nonlocal runs
            runs = ours if on else original
            self.active = on

        self.active = True
        self.function, self.switch = function, switch
        setattr(owner, name, function)

    @property
    def on_top(self) -> bool:
        """Whether ours is what a call meets first."""
        # By identity: someone else's functools.wraps copies what ours is marked with.
        return vars(self.owner).get(self.name) is self.function

    @property
    def reached(self) -> bool:
        """Whether a call gets to ours, by itself or through a function that someone put around it, as far as seen."""
        return self.on_top or _leads_to(vars(self.owner).get(self.name), self.function)

    @property
    def state(self) -> str:
        """In words, for `status()`."""
        if self.on_top:
            return "wrapped" if self.active else "not wrapped"
        who = _full_name(getattr(self.owner, self.name, None))
        if not self.reached:
            return f"wrapped, then replaced by {who}"
        return f"wrapped, then wrapped by {who}" if self.active else f"unwrapped, but inside {who}"

    def take_back(self) -> None:
        """Give the owner back what it had; what someone put around ours or in its place stays, and passes ours by."""
        self.switch(False)
        if self.on_top and self._before is not None:
            setattr(self.owner, self.name, self._before)
        elif self.on_top:
            delattr(self.owner, self.name)


class Patches:
    """The patches of this process."""

    def __init__(self) -> None:
        self._patches: list[Patch] = []

    def put(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        """Patch a function, once: a patch that a call reaches is switched on again, a replaced one put on top anew."""
        patch = self._find(owner, name)
        if patch is not None and patch.reached:
            patch.switch(True)
            return
        if patch is not None:
            patch.switch(False)  # where it cannot be seen someone may still call it
            self._patches.remove(patch)
        self._patches.append(Patch(owner, name, replacement))

    @contextmanager
    def during(self, owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
        """Patch a function inside the `with` block."""
        self.put(owner, name, replacement)
        patch = self._find(owner, name)
        try:
            yield
        finally:
            self.take_back(patch)

    def take_back(self, only: Patch | None = None) -> None:
        """Take one or all of them back. Those inside someone else's function stay in the list, switched off."""
        for patch in reversed(self._patches):
            if only in (None, patch):
                patch.take_back()
        self._patches = [patch for patch in self._patches if patch.active or patch.reached]

    def state(self, owner: Any, name: str) -> str:
        """What became of a function, in words."""
        patch = self._find(owner, name)
        # A patch of a class can be gone with the function that someone took away: then the class inherits again.
        if patch is not None and (name in vars(owner) or not isinstance(owner, type)):
            return patch.state
        if name in vars(owner):
            return "not wrapped"
        inherited = getattr(owner, name, None)
        ours = any(patch.active and patch.function is inherited for patch in self._patches)
        return "absent" if inherited is None else f"inherits the {'' if ours else 'un'}wrapped one"

    def instance_state(self, instance: Any, name: str) -> str:
        """What a function of an instance's own, which hides its class's, makes of ours, in words."""
        own, of_class = vars(instance)[name], getattr(type(instance), name)
        if not any(patch.active and patch.function is of_class for patch in self._patches):
            return "not wrapped"
        what = "wrapped" if _leads_to(own, of_class) else "replaced"
        return f"wrapped, then {what} in an engine by {_full_name(own)}"

    def __iter__(self) -> Iterator[Patch]:
        """All of them, in the order in which they were put."""
        return iter(self._patches)

    def _find(self, owner: Any, name: str) -> Patch | None:
        return next((patch for patch in self._patches if patch.owner is owner and patch.name == name), None)


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Show someone else's instance other attributes inside the `with` block."""
    own = {name: value for name, value in vars(owner).items() if name in attributes}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            if name in own:
                vars(owner)[name] = own[name]
            else:
                del vars(owner)[name]


def _leads_to(start: Any, wanted: Callable[..., Any]) -> bool:
    """Whether a function holds on to another: wraps it, closes over it, is bound to its holder, or names it."""
    waiting, seen = [start], set[int]()
    while waiting and len(seen) < _LOOKED_AT:
        found = waiting.pop(0)
        if found is wanted:
            return True
        if id(found) not in seen:
            seen.add(id(found))
            waiting += (held for held in _held_by(found) if callable(held) and not isinstance(held, type))
    return False


def _held_by(function: Any) -> Iterator[Any]:
    holder = function
    if isinstance(function, MethodType):
        yield function.__func__
        holder = function.__self__
    if isinstance(function, functools.partial):
        yield from (function.func, *function.args, *function.keywords.values())
    yield from getattr(holder, "__dict__", {}).values()
    if isinstance(function, FunctionType):
        for cell in function.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        yield from (function.__globals__.get(name) for name in function.__code__.co_names)


def _full_name(function: Any) -> str:
    if isinstance(function, FunctionType):  # functools.wraps copies the names of what it wraps
        return f"{function.__globals__.get('__name__')}.{function.__code__.co_qualname}"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
