"""OpenAI's vector-store filters over the attributes of a file."""

from retrieval.types import Attributes, AttributeValue, Filter


def matches(condition: Filter, attributes: Attributes) -> bool:
    """Whether attributes satisfy a comparison or a compound.

    An attribute that is absent satisfies `ne` and `nin` alone. Order is defined between two numbers or two strings;
    between others gt, gte, lt and lte do not hold. True is not 1 here. Raises ValueError for an unknown `type`.
    """
    if condition.type == "and":
        return all(matches(part, attributes) for part in condition.filters)
    if condition.type == "or":
        return any(matches(part, attributes) for part in condition.filters)
    found = attributes.get(condition.key)
    match condition.type:
        case "eq" | "in":
            return found is not None and _among(found, condition.value)
        case "ne" | "nin":
            return found is None or not _among(found, condition.value)
        case "gt" | "gte" | "lt" | "lte":
            return found is not None and _in_order(condition.type, found, condition.value)
    raise ValueError(f"unknown filter type '{condition.type}'")


def _among(found: AttributeValue, wanted: AttributeValue | tuple[AttributeValue, ...]) -> bool:
    values = wanted if isinstance(wanted, tuple) else (wanted,)
    return any(isinstance(found, bool) == isinstance(value, bool) and found == value for value in values)


def _in_order(relation: str, found: AttributeValue, wanted: AttributeValue | tuple[AttributeValue, ...]) -> bool:
    if isinstance(found, str) and isinstance(wanted, str):
        below, equal = found < wanted, found == wanted
    elif _is_number(found) and _is_number(wanted):
        below, equal = found < wanted, found == wanted  # type: ignore[operator]
    else:
        return False
    match relation:
        case "gt":
            return not below and not equal
        case "gte":
            return not below
        case "lt":
            return below
        case _:
            return below or equal


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
