//! The trainer in a simulated process. Not for users.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use elasticdl_data::{Dataset, File, Reader};
use elasticdl_proto::{FileList, WorkerId, WorkerMessage};
pub use elasticdl_tables::{ChunkLayout, Chunks, Owned, Placement, Settings, shard_of};
use tokio::sync::mpsc::UnboundedSender;

use crate::control::dataset;
use crate::donor::{Donor, TRANSFER_IDLE_TIMEOUT};
use crate::exports::{ExportPlaces, Exports};
use crate::gap::GapTimer;
use crate::machine::{self, CheckpointStore, Links, Machine, Records};
pub use crate::messages::ControlEvent;
use crate::messages::Outbox;
use crate::model::{Model, NamedTensor};
use crate::ordered_reader::{OrderedReader, data_order};
use crate::session::evaluation::Plan;
use crate::session::{Exit, Session};
use crate::tensor::ModelSize;
use crate::tensors::{HostState, Tensors};
pub use crate::trainer::ReplacedRows;
use crate::trainer::{Checkpointing, Failed, RowTables, ShardedOptimizer, Trainer, Validation};
use crate::update::UpdateRule;

/// What a trainer is made of. It computes on the CPU, exports nothing, and its model has no
/// optimizer state.
#[expect(missing_debug_implementations, reason = "models need not be printable")]
pub struct Parts<M: Model> {
    pub session: Session,
    pub model: M,
    pub records: Box<dyn Records<<M::Reader as Reader>::Record>>,
    pub links: Box<dyn Links>,
    pub checkpoints: Box<dyn CheckpointStore>,
    pub machine: Arc<dyn Machine>,
    pub dataset: FileList,
    /// Timeout of the dial of a donor.
    pub dial_limit: Duration,
    /// Maximum number of floats in a part of a state that is sent to a joiner.
    pub part_floats: usize,
    /// When the model is evaluated, if it is, on data of one file.
    pub evaluation: Option<Plan>,
    /// The worker, and how the model's tables are divided, if it has any.
    pub tables: (WorkerId, Settings),
    /// How the optimizer's state is divided, and how many bytes of it are copied at a time, if it
    /// is.
    pub chunks: Option<(ChunkLayout, u64)>,
    /// Whether a group that has lost rows goes on with older ones.
    pub goes_on_with_older: bool,
}

/// A trainer that is driven turn by turn.
#[expect(missing_debug_implementations, reason = "models need not be printable")]
pub struct SimulatedTrainer<'a, M: Model>(Trainer<'a, M>);

impl<'a, M: Model> SimulatedTrainer<'a, M> {
    /// `messages`: to the master. `holds_state`: whether its group has agreed on a state.
    pub fn new(
        parts: Parts<M>,
        inbox: &'a Receiver<ControlEvent>,
        messages: UnboundedSender<WorkerMessage>,
        holds_state: Arc<AtomicBool>,
    ) -> Self {
        let Parts { session, mut model, records, links, checkpoints, machine, dataset, .. } = parts;
        let (me, settings) = parts.tables;
        let specs = model.as_table_model().map(|model| model.tables()).unwrap_or_default();
        let mut tables = RowTables::with(me.0, settings, specs);
        tables.iter_mut().for_each(|t| t.goes_on_with_older = parts.goes_on_with_older);
        let validation = parts.evaluation.map(|plan| {
            let dataset = Dataset::new(vec![File::new("validation", plan.records)]);
            let order = data_order(&dataset);
            Validation { reader: OrderedReader::new(model.reader().into(), dataset, order), plan }
        });
        let rule: Box<dyn UpdateRule> = Box::new(model.optimizer());
        let size = ModelSize::new(NamedTensor::count(&model.tensors()), &*rule);
        let sharded = parts.chunks.map(|(layout, copy_bytes)| {
            let chunks = Chunks::of_optimizer(me.0, layout).copying(copy_bytes);
            ShardedOptimizer::new(chunks, &*rule, None)
        });
        let state = match sharded {
            Some(_) => HostState::sharded(size.parameters),
            None => HostState::new(size),
        };
        Self(Trainer {
            tensors: Tensors::Host { group: None, state },
            rule,
            model,
            seed: 0,
            session,
            exact: None,
            audited: Vec::new(),
            summed: Ok(0),
            order: data_order(&dataset::unpack(&dataset)),
            records,
            exports: Exports::new(ExportPlaces::default(), Vec::new()),
            links,
            allreduce_transport: None,
            donor: Donor::new(TRANSFER_IDLE_TIMEOUT, parts.part_floats, Arc::clone(&machine)),
            checkpoints: Checkpointing {
                store: checkpoints,
                run: String::new(),
                best_metric: None,
                allows_mixed_builds: false,
                timed: Default::default(),
            },
            validation,
            tables,
            fed: None,
            sharded,
            source: None,
            is_used: false,
            incoming: None,
            dial_limit: parts.dial_limit,
            inbox,
            outbox: Outbox { holds_state, ..Outbox::new(messages) },
            started: machine.now(),
            machine,
            gap: GapTimer::default(),
        })
    }

    /// Handles the messages that have arrived, and performs the next task. Returns why training has
    /// ended, if it has.
    ///
    /// # Errors
    /// The report of the failure of this worker.
    pub fn turn(&mut self) -> Result<Option<Exit>, Box<WorkerMessage>> {
        self.0.turn().map_err(|Failed { failure, .. }| Box::new(failure.to_message()))
    }

    pub fn session(&self) -> &Session {
        &self.0.session
    }

    /// When the group's ranks have agreed on a state, if none has been committed since.
    pub fn repaired_at(&self) -> Option<Instant> {
        self.0.gap.repaired_at()
    }

    /// This worker's shards of the model's tables, if there are any.
    pub fn rows(&self) -> Option<&Owned> {
        self.0.tables.as_ref().map(RowTables::owned)
    }

    /// The lost rows that older ones have replaced since the last call.
    pub fn take_replaced_rows(&mut self) -> Option<ReplacedRows> {
        self.0.tables.as_mut()?.replaced.take()
    }

    /// This worker's chunks of the optimizer's state, if it is divided.
    pub fn chunks(&self) -> Option<&Chunks> {
        self.0.sharded.as_ref().map(ShardedOptimizer::chunks)
    }

    /// Whether the parameters are those of the step: with a sharded optimizer, a broken group may
    /// have left some of another.
    pub fn has_parameters(&self) -> bool {
        self.0.sharded.as_ref().is_none_or(ShardedOptimizer::is_gathered)
    }

    /// Whether the group has given its state up, as shards that belong to it are lost.
    pub fn has_lost_rows(&self) -> bool {
        self.0.tables.as_ref().is_some_and(RowTables::has_lost_rows)
            || self.0.sharded.as_ref().is_some_and(ShardedOptimizer::has_lost_chunks)
    }

    pub fn parameters(&self) -> &[f32] {
        match &self.0.tensors {
            Tensors::Device { .. } => unreachable!("it computes on the CPU"),
            Tensors::Host { state, .. } => &state.parameters,
        }
    }

    /// Changes the parameters, as a fault of the memory does.
    pub fn edit_parameters(&mut self, edit: impl FnOnce(&mut [f32])) {
        if let Tensors::Host { state, .. } = &mut self.0.tensors {
            edit(state.parameters.writable());
        }
    }
}

/// Receives a message; blocks for `timeout` at most.
///
/// # Errors
/// As for [`Receiver::recv_timeout`].
pub fn receive<T>(
    machine: &dyn Machine,
    from: &Receiver<T>,
    timeout: Duration,
) -> Result<T, RecvTimeoutError> {
    machine::receive(machine, from, timeout)
}
