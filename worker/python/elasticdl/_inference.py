"""Evaluation and prediction: what a program says of its model beside training."""

import dataclasses


class Function:
    """A function of the program, and the data that it is applied to. It decorates the function."""

    def __init__(self, length, micro_batch, convert, ids=None):
        """``convert(function, indices)`` calls the function, and returns what the core takes.
        ``ids(indices)``: the ids of these records, if there are tables."""
        self.length = length
        self.micro_batch = micro_batch
        self.function = None
        self._convert = convert
        self.ids = ids

    def __call__(self, function):
        if not callable(function):
            raise TypeError(f"{function!r} can't be called; it must be a function")
        self.function = function
        return function

    def run(self, indices):
        """The result for these records."""
        return self._convert(self.function, indices)


class Evaluator(Function):
    """Computes metrics. All micro-batches have the same ones."""

    def __init__(self, length, micro_batch, call, ids=None):
        super().__init__(length, micro_batch, call, ids)
        self._names = None

    def run(self, indices):
        """The metrics of these records: pairs of a name and the mean over them."""
        means = super().run(indices)
        if not isinstance(means, dict) or not means:
            raise TypeError(
                f"the evaluator returned {_described(means)}; it must return a dict of metrics by "
                "name, each the mean over the micro-batch or a tensor with one value per record"
            )
        pairs = [(_name(name), _mean(name, value, len(indices))) for name, value in means.items()]
        names = {name for name, _ in pairs}
        if self._names not in (None, names):
            raise ValueError(
                f"the evaluator returned the metrics {sorted(names)} after {sorted(self._names)}; "
                "all micro-batches must have the same ones"
            )
        self._names = names
        return pairs


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of predictions. ``kind``: "f32", "i64" or "text"."""

    name: str
    kind: str
    values: list


class Predictor(Function):
    """Makes predictions: columns with one value per record."""

    def run(self, indices):
        """The columns of these records: their names, types and values."""
        columns = super().run(indices)
        if not isinstance(columns, dict) or not columns:
            raise TypeError(
                f"the predictor returned {_described(columns)}; it must return a dict of columns "
                "by name, each with one value per record"
            )
        return [_column(_name(name), value, len(indices)) for name, value in columns.items()]


def _described(value):
    return "an empty dict" if value == {} else f"a {type(value).__name__}"


def _name(name):
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is the name of a metric or a column; it must be a str")
    return name


def _mean(name, value, records):
    values = _listed(value)
    if not isinstance(values, list):
        values = [values]
    elif len(values) != records:
        raise ValueError(
            f"the metric {name} has {len(values)} values for {records} record"
            f"{'' if records == 1 else 's'}; it must be their mean, or one value per record"
        )
    return sum(float(each) for each in values) / len(values)


def _column(name, value, records):
    values = _listed(value)
    if not isinstance(values, list) or len(values) != records:
        found = f"{len(values)} values" if isinstance(values, list) else _described(value)
        raise ValueError(
            f"the column {name} has {found} for {records} records; it must have one value per "
            "record"
        )
    for kind, types in ("i64", int), ("f32", (int, float)), ("text", str):
        if all(isinstance(each, types) for each in values):
            return Column(name, kind, values)
    raise TypeError(f"the column {name} has values that are neither numbers nor text")


def _listed(value):
    """Tensors and arrays, as lists or numbers of Python."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value
