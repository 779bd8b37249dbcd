//! A worker, as Python sees it.

use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use elasticdl::external::{
    AloneOptions, Chunk, Comparison, Counted, Division, Driver, Ended, Event, Inference, Memory,
    NextBatch, ProgramMemory, Record, Shape, SourceFile, StateMemory, StatePart, Worker,
    WorkerError,
};
use elasticdl::{NamedTensor, Predictions};
use pyo3::exceptions::{PyRuntimeError, PySystemExit, PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::batches::{CountedBatch, MicroBatch};
use crate::floats::Floats;
use crate::gpu::GpuMemory;
use crate::options::Options;
use crate::progress::Progress;
use crate::rows::{self, Feature, NotAnnounced, TableOfProgram};

/// A worker of a job, or one that trains alone.
#[pyclass(frozen, module = "elasticdl._elasticdl")]
#[derive(Debug)]
pub(crate) struct Core {
    stage: Mutex<Stage>,
    options: Options,
    work: &'static str,
    data: Option<String>,
    validation_data: Option<String>,
    is_alone: bool,
    id: u64,
}

#[derive(Debug)]
enum Stage {
    Ended,
    Joined(Box<Worker>),
    Training(Box<Training>),
}

#[derive(Debug)]
struct Training {
    driver: Driver,
    /// Gradient of one micro-batch, and in an update that of the step; `None` if the program itself
    /// adds to the trainer's.
    gradient: Option<Box<dyn ProgramMemory>>,
    calls: Calls,
    evaluation: Option<Application>,
    prediction: Option<Application>,
}

/// What the program does for the trainer: functions, attributes of an object of Python.
#[derive(Debug, FromPyObject)]
struct Calls {
    /// `initialize(seed, address of the parameters on the host)`.
    initialize: Py<PyAny>,
    /// `update(step, records, loads, address of the sum)`.
    update: Py<PyAny>,
    /// `gathered(loads)`: with a sharded optimizer, the parameters are those of the step.
    gathered: Py<PyAny>,
    /// `load(trains)`: the parameters are new, and if the worker trains, its state.
    load: Py<PyAny>,
}

/// How the program applies its model to data, as attributes of an object of Python.
#[derive(Debug, FromPyObject)]
struct Application {
    /// Number of records.
    length: u64,
    /// Maximum number of records of a call.
    micro_batch: usize,
    /// `run(records)`: their metrics, or columns.
    run: Py<PyAny>,
    /// `ids(records)`: their ids, as features, before `run` is called.
    ids: Py<PyAny>,
}

/// A column of predictions, as attributes of an object of Python.
#[derive(Debug, FromPyObject)]
struct Column<'py> {
    name: String,
    kind: String,
    values: Bound<'py, PyAny>,
}

/// The memory of a model, and the progress of its training.
#[pyclass(frozen, get_all, module = "elasticdl._elasticdl")]
#[derive(Debug)]
pub(crate) struct Started {
    parameters: Py<Floats>,
    gradient: Py<Floats>,
    state: Py<Floats>,
    progress: Py<Progress>,
}

#[pymethods]
impl Core {
    /// Joins the job that launched this process; None if none has.
    #[staticmethod]
    fn join(py: Python<'_>) -> PyResult<Option<Self>> {
        let worker = py.detach(Worker::join).map_err(error_of)?;
        Ok(worker.map(|worker| Self::new(worker, false)))
    }

    /// A worker without a master.
    #[staticmethod]
    fn alone(
        py: Python<'_>,
        epochs: u32,
        max_steps: Option<u64>,
        global_batch: u64,
        seed: u64,
        shuffles: bool,
    ) -> PyResult<Self> {
        let global_batch = NonZeroU64::new(global_batch)
            .ok_or_else(|| PyValueError::new_err("global_batch is 0; it must be positive"))?;
        let options = AloneOptions { epochs, max_steps, global_batch, seed, shuffles };
        let worker = py.detach(|| Worker::alone(options)).map_err(error_of)?;
        Ok(Self::new(worker, true))
    }

    #[getter]
    fn options(&self) -> Options {
        self.options
    }

    /// What the job does: "evaluate", "predict" or "train".
    #[getter]
    fn work(&self) -> &'static str {
        self.work
    }

    /// Value of `--training-data` or `--data`.
    #[getter]
    fn data(&self) -> Option<&str> {
        self.data.as_deref()
    }

    /// Value of `--validation-data`.
    #[getter]
    fn validation_data(&self) -> Option<&str> {
        self.validation_data.as_deref()
    }

    #[getter]
    fn id(&self) -> u64 {
        self.id
    }

    #[getter]
    fn is_alone(&self) -> bool {
        self.is_alone
    }

    /// Declares the model. The trainer starts at the first `wait`. `is_direct`: the program adds
    /// gradients to the trainer's itself, and the memory of the gradient is empty. `state`: number
    /// of floats; with `division`, the number of parameters without state and the floats of state
    /// of each other one, those beside these. `parts`: name, first float, number of floats and fill
    /// of each part of the state, as of [`StatePart`]. `clipped_from`: the first element of the
    /// gradient that counts in `norm()`. `on_gpu`: memory of the program there; the memory on the
    /// host is then empty, unless there is a `division`. `sources`: the program's files, by names
    /// that are the same on all workers. `settings`: with which it has made its optimizer.
    #[expect(clippy::too_many_arguments, reason = "the arguments have names in Python")]
    #[pyo3(signature = (
        *, records, tensors, tables, state, division, parts, clipped_from, micro_batch, absorbed,
        bucket_len, is_direct, on_gpu, evaluation, prediction, sources,
        settings, calls
    ))]
    fn start(
        &self,
        py: Python<'_>,
        records: u64,
        tensors: Vec<(String, Vec<usize>)>,
        tables: Vec<TableOfProgram>,
        state: usize,
        division: Option<(usize, usize)>,
        parts: Vec<(String, usize, usize, Option<f32>)>,
        clipped_from: Option<usize>,
        micro_batch: usize,
        absorbed: u64,
        bucket_len: Option<usize>,
        is_direct: bool,
        on_gpu: Option<GpuMemory>,
        evaluation: Option<Application>,
        prediction: Option<Application>,
        sources: Vec<(String, PathBuf)>,
        settings: String,
        calls: Calls,
    ) -> PyResult<Started> {
        let mut stage = self.stage()?;
        let tensors: Vec<_> =
            tensors.into_iter().map(|(name, shape)| NamedTensor::new(name, shape)).collect();
        let parameters = NamedTensor::count(&tensors);
        let shape = Shape {
            records,
            tensors,
            tables: tables.into_iter().map(TableOfProgram::table).collect::<PyResult<_>>()?,
            state,
            division: division.map(|(first, slots)| Division { first, slots }),
            state_parts: parts
                .into_iter()
                .map(|(name, at, len, fill)| StatePart { name, at, len, fill })
                .collect(),
            clipped_from,
            bucket_len,
            absorbed,
            evaluation: evaluation.as_ref().and_then(Application::inference),
            prediction: prediction.as_ref().and_then(Application::inference),
            sources: sources.into_iter().map(|(name, path)| SourceFile { name, path }).collect(),
            settings,
        };
        if let Some(converted) = py.detach(|| shape.convert()) {
            *stage = Stage::Ended;
            // The command prints the error as that of the program.
            return Err(converted.err().map_or_else(
                || PySystemExit::new_err(0),
                |error| PySystemExit::new_err(format!("the checkpoint was not converted: {error}")),
            ));
        }
        let gradients = if is_direct { 0 } else { parameters };
        let worker = match std::mem::replace(&mut *stage, Stage::Ended) {
            Stage::Joined(worker) => *worker,
            other => {
                *stage = other;
                return Err(PyRuntimeError::new_err("a job trains one model, once"));
            }
        };
        let is_on_host = on_gpu.is_none() || division.is_some();
        let lengths = if is_on_host { [parameters, gradients, state] } else { [0; 3] };
        let [parameters, gradient, state] = py.detach(|| lengths.map(Floats::new));
        let on_host = || {
            let (parameters, slots) = (parameters.for_trainer(), state.for_trainer());
            StateMemory { parameters, slots }
        };
        let memory = match on_gpu {
            Some(memory) => Memory::Device(memory.into_trainer(), is_on_host.then(on_host)),
            None => Memory::Host(on_host()),
        };
        let driver = Driver::new(worker, shape, memory, micro_batch);
        let watch = driver.watch();
        let own = (!is_direct).then(|| gradient.for_trainer());
        let training = Training { driver, gradient: own, calls, evaluation, prediction };
        *stage = Stage::Training(Box::new(training));
        Ok(Started {
            parameters: Py::new(py, parameters)?,
            gradient: Py::new(py, gradient)?,
            state: Py::new(py, state)?,
            progress: Py::new(py, Progress { watch })?,
        })
    }

    /// Waits until the trainer requests a gradient or ids, and updates parameters meanwhile.
    /// Returns whether it does; if not, the job is complete. `until`: returns when this epoch is
    /// complete, before anything of a later one changes parameters.
    #[pyo3(signature = (until=None))]
    fn wait(&self, py: Python<'_>, until: Option<u32>) -> PyResult<bool> {
        loop {
            let event = {
                let mut stage = self.stage()?;
                let Stage::Training(training) = &mut *stage else {
                    return Err(PyRuntimeError::new_err("training has not begun"));
                };
                let driver = &mut training.driver;
                if driver.is_requested() {
                    return Ok(true);
                }
                py.detach(|| driver.wait(SIGNAL_INTERVAL, until))
            };
            py.check_signals()?;
            match event {
                None => {}
                Some(Event::Ended(Ended::Complete)) => return Ok(false),
                Some(Event::EpochComplete) => return Ok(true),
                Some(Event::Ended(Ended::Failed(error))) => {
                    return Err(PyRuntimeError::new_err(error));
                }
                Some(Event::Ended(Ended::Left(code))) => {
                    return Err(PySystemExit::new_err(i32::from(code)));
                }
                Some(Event::Evaluate { records }) => {
                    let which = |training: &Training| training.evaluation.as_ref().map(run_of(py));
                    let means = self.apply(py, records, which)?;
                    let means = means.extract::<Vec<(String, f64)>>(py)?;
                    self.training(|training| training.driver.evaluated(means))?;
                }
                Some(Event::AppliedIds { predicts, records }) => {
                    let which = |Training { evaluation, prediction, .. }: &Training| {
                        let application = if predicts { prediction } else { evaluation };
                        application.as_ref().map(|one| one.ids.clone_ref(py))
                    };
                    let features = self.apply(py, records, which)?;
                    let features = features.extract::<Vec<Feature<'_>>>(py)?;
                    self.training(|training| {
                        training.driver.announce_applied(|ids| rows::add(features, ids))
                    })??;
                }
                Some(Event::Ids { .. }) => return Ok(true),
                Some(Event::Predict { records }) => {
                    let which = |training: &Training| training.prediction.as_ref().map(run_of(py));
                    let columns = self.apply(py, records, which)?;
                    let rows = rows_of(columns.extract::<Vec<Column<'_>>>(py)?)?;
                    self.training(|training| training.driver.predicted(rows))?;
                }
                Some(Event::Gathered { loads }) => {
                    self.call(py, |calls| &calls.gathered)?.call1(py, (loads,))?;
                    self.training(|training| training.driver.done())?;
                }
                Some(Event::Gradient { loads }) => {
                    if loads {
                        self.call(py, |calls| &calls.load)?.call1(py, (true,))?;
                    }
                    return Ok(true);
                }
                Some(Event::Initialize { seed }) => {
                    let address = self.training(|training| training.driver.address())?;
                    let initialize = self.call(py, |calls| &calls.initialize)?;
                    initialize.call1(py, (seed, address.unwrap_or(0)))?;
                    self.training(|training| training.driver.done())?;
                }
                Some(Event::Update { step, records, loads }) => {
                    let address = self.training(Training::begin_update)?;
                    let update = self.call(py, |calls| &calls.update)?;
                    update.call1(py, (step, records, loads, address))?;
                    self.training(Training::end_update)?;
                }
            }
        }
    }

    /// The next micro-batch; None if there is none now. `until`: the last epoch whose records may
    /// be drawn; None if it is complete.
    #[pyo3(signature = (until=None))]
    fn next_batch(&self, py: Python<'_>, until: Option<u32>) -> PyResult<Option<MicroBatch>> {
        let batch = self.training(|training| {
            let driver = &mut training.driver;
            py.detach(|| driver.next_batch(until))
        })?;
        Ok(match batch {
            NextBatch::Batch(records) => {
                // A micro-batch lies in one step, and a step in one epoch.
                let epoch = records.first().map_or(0, |record| record.epoch);
                let records = records.iter().map(|record| record.number).collect();
                Some(MicroBatch { epoch, records, must_wait: false })
            }
            NextBatch::Ended | NextBatch::Later => None,
            NextBatch::Wait => Some(MicroBatch { epoch: 0, records: Vec::new(), must_wait: true }),
        })
    }

    /// Whether the trainer waits for the ids of micro-batches, and whether it has all; None if it
    /// does not wait.
    fn announced(&self) -> PyResult<Option<bool>> {
        self.training(|training| training.driver.announced())
    }

    /// Whether what was announced has to be announced again.
    fn starts_over(&self) -> PyResult<bool> {
        self.training(|training| training.driver.starts_over())
    }

    /// Announces the ids of the micro-batch that was drawn first. Returns whether it counts.
    fn announce(&self, features: Vec<Feature<'_>>) -> PyResult<bool> {
        let announced = self.training(|training| {
            training.driver.announce::<NotAnnounced>(|ids| Ok(rows::add(features, ids)?))
        })?;
        Ok(announced?)
    }

    /// All ids are announced.
    fn look_up(&self) -> PyResult<()> {
        self.training(|training| training.driver.look_up())
    }

    /// Number of rows of a table that are there.
    fn rows(&self, table: usize) -> PyResult<usize> {
        self.training(|training| training.driver.ids().of(table).len())
    }

    /// Writes the positions of the rows of ids to `to`. Returns the first id that was not
    /// announced.
    fn find_rows(
        &self,
        table: usize,
        ids: &Bound<'_, PyAny>,
        to: &Bound<'_, PyAny>,
    ) -> PyResult<Option<i64>> {
        self.training(|training| rows::find(&training.driver, table, ids, to))?
    }

    /// Copies the rows of a table to `to`.
    fn read_rows(&self, table: usize, to: &Bound<'_, PyAny>) -> PyResult<()> {
        self.training(|training| rows::read(&mut training.driver, table, to))?
    }

    /// Adds `scale` times `gradient` to that of the rows of a table.
    fn add_row_gradient(
        &self,
        table: usize,
        gradient: &Bound<'_, PyAny>,
        scale: f32,
    ) -> PyResult<()> {
        self.training(|training| rows::add_gradient(&mut training.driver, table, gradient, scale))?
    }

    /// How the micro-batch that is delivered next counts.
    fn counted(&self) -> PyResult<CountedBatch> {
        self.training(|Training { driver, .. }| match driver.counted() {
            Some(Counted { records, before, is_last, is_overlapped, comparison }) => CountedBatch {
                address: driver.address(),
                records,
                before,
                is_last,
                is_overlapped,
                is_compared: comparison != Comparison::None,
                is_again: comparison == Comparison::Again,
            },
            None => CountedBatch::default(),
        })
    }

    /// In an update: of each chunk of this worker its first parameter, its number of parameters,
    /// and the addresses of its state and of its sum.
    fn chunks(&self) -> PyResult<Vec<(usize, usize, usize, usize)>> {
        let places = |Chunk { start, len, slots, sum }| (start, len, slots, sum);
        self.training(|training| training.driver.chunks().into_iter().map(places).collect())
    }

    /// In an update: the norm of the sum, if it has elements that count.
    fn norm(&self) -> PyResult<Option<f64>> {
        self.training(|training| training.driver.norm())
    }

    /// Lets the trainer sum the gradient's elements from `start` on.
    fn complete_from(&self, start: usize) -> PyResult<()> {
        self.training(|training| training.driver.complete_from(start))
    }

    /// Reports a metric of the micro-batch that is delivered next, a mean over its records.
    fn report(&self, name: String, mean: f64) -> PyResult<()> {
        self.training(|training| training.driver.report(name, mean))
    }

    /// Adds a value to the tally of the step, with the micro-batch that is delivered next.
    fn add(&self, name: String, value: f64) -> PyResult<()> {
        self.training(|training| training.driver.add(name, value))
    }

    /// Delivers the gradient of the micro-batch that was drawn first. Returns whether it counts.
    fn deliver(&self, py: Python<'_>, loss: f64, is_mean: bool) -> PyResult<bool> {
        self.training(|training| {
            py.detach(|| {
                training.add_gradient(is_mean);
                training.driver.deliver(loss)
            })
            .map_err(error_of)
        })?
    }

    /// Reports an error of the program, and ends this worker. `is_refused`: of this package.
    fn fail(&self, py: Python<'_>, error: String, is_refused: bool) -> PyResult<()> {
        let mut stage = self.stage()?;
        match std::mem::replace(&mut *stage, Stage::Ended) {
            Stage::Ended => {}
            Stage::Joined(worker) => py.detach(|| worker.fail(error, is_refused)),
            Stage::Training(mut training) => {
                py.detach(|| training.driver.fail(error, is_refused, FAIL_TIMEOUT));
            }
        }
        Ok(())
    }
}

impl Core {
    fn new(worker: Worker, is_alone: bool) -> Self {
        let options = worker.options().into();
        let (id, work) = (worker.id(), worker.work());
        let data = Some(worker.data()).filter(|data| !data.is_empty()).map(str::to_owned);
        let validation_data = worker.validation_data().map(str::to_owned);
        let stage = Mutex::new(Stage::Joined(Box::new(worker)));
        Self { stage, options, work, data, validation_data, is_alone, id }
    }

    fn stage(&self) -> PyResult<MutexGuard<'_, Stage>> {
        // Waiting for another thread would hold Python's lock, which that thread needs.
        match self.stage.try_lock() {
            Ok(stage) => Ok(stage),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Err(PyRuntimeError::new_err(
                "this job is in use by another thread; use a job in one thread",
            )),
        }
    }

    fn training<T>(&self, act: impl FnOnce(&mut Training) -> T) -> PyResult<T> {
        match &mut *self.stage()? {
            Stage::Training(training) => Ok(act(training)),
            Stage::Ended => Err(PyRuntimeError::new_err("this job has ended")),
            Stage::Joined(_) => Err(PyRuntimeError::new_err("training has not begun")),
        }
    }

    /// Applies the model to records, with the buffers of the group's state.
    fn apply(
        &self,
        py: Python<'_>,
        records: Vec<Record>,
        which: impl Fn(&Training) -> Option<Py<PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        self.call(py, |calls| &calls.load)?.call1(py, (false,))?;
        let run = self.training(|training| which(training))?;
        let run = run.ok_or_else(|| PyRuntimeError::new_err("the program has no such function"))?;
        let records: Vec<u64> = records.into_iter().map(|record| record.number).collect();
        run.call1(py, (records,))
    }

    fn call(&self, py: Python<'_>, which: impl Fn(&Calls) -> &Py<PyAny>) -> PyResult<Py<PyAny>> {
        self.training(|training| which(&training.calls).clone_ref(py))
    }
}

impl Application {
    fn inference(&self) -> Option<Inference> {
        Some(Inference { records: self.length, batch: NonZeroUsize::new(self.micro_batch)? })
    }
}

impl Training {
    /// Adds the program's gradient of a micro-batch to the trainer's, and clears it.
    fn add_gradient(&mut self, is_mean: bool) {
        let Self { driver, gradient: Some(own), .. } = self else { return };
        let own = own.floats_mut();
        if let (Some(counted), Some(gradient)) = (driver.counted(), driver.gradient()) {
            let scale = if is_mean { counted.records as f32 } else { 1.0 };
            let pairs = gradient.iter_mut().zip(own.iter());
            if counted.before == 0 {
                pairs.for_each(|(sum, own)| *sum = scale * own);
            } else {
                pairs.for_each(|(sum, own)| *sum += scale * own);
            }
        }
        own.fill(0.0);
    }

    /// Shows the sum to the program. Returns its address.
    fn begin_update(&mut self) -> usize {
        if let (Some(own), Some(sum)) = (&mut self.gradient, self.driver.sum()) {
            own.floats_mut().copy_from_slice(sum);
        }
        self.driver.address().unwrap_or(0)
    }

    fn end_update(&mut self) {
        if let Some(own) = &mut self.gradient {
            own.floats_mut().fill(0.0);
        }
        self.driver.done();
    }
}

/// What applies the model.
fn run_of(py: Python<'_>) -> impl Fn(&Application) -> Py<PyAny> {
    move |application| application.run.clone_ref(py)
}

fn rows_of(columns: Vec<Column<'_>>) -> PyResult<Predictions> {
    let mut rows = Predictions::new();
    for Column { name, kind, values } in columns {
        rows = match kind.as_str() {
            "f32" => rows.f32(&name, values.extract()?),
            "i64" => rows.i64(&name, values.extract()?),
            "text" => rows.text(&name, values.extract()?),
            other => return Err(PyTypeError::new_err(format!("columns can't be {other}"))),
        };
    }
    Ok(rows)
}

pub(crate) fn error_of(error: WorkerError) -> PyErr {
    match error {
        // As a Rust program ends that no master answers.
        WorkerError::NoMaster(_) => PySystemExit::new_err(EXIT_MASTER_LOST),
        error => PyRuntimeError::new_err(error.to_string()),
    }
}

/// Interval at which signals of Python are handled during a wait.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);
/// Time for which a failed program waits until the master knows, and until the state is stored if
/// no other worker has it: requests to storage are repeated for as long.
const FAIL_TIMEOUT: Duration = Duration::from_secs(600);
/// See `elasticdl::run`.
const EXIT_MASTER_LOST: i32 = 70;
