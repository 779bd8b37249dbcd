//! The manifest of a checkpoint, and whether a job can resume from it.

use std::ops::Range;
use std::path::Path;

use elasticdl_data::Dataset;
use elasticdl_proto::{Batch, OrderName};
use elasticdl_tables::{ChunkLayout, Table};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use super::table_rows::{ChunkedSlots, TableRows};
use crate::external::StatePart;
use crate::session::checkpoint::Written;
use crate::session::evaluation::Plan;
use crate::session::header::StateRecord;
use crate::session::origin::Program;

/// Identity of a job and its settings that checkpoints depend on.
#[derive(Clone, Debug)]
pub(crate) struct JobFingerprint {
    pub(crate) job: String,
    /// Distinguishes runs of the same job: 8 hexadecimal digits.
    pub(crate) run: String,
    pub(crate) parameters: usize,
    /// Number of floats of the optimizer state.
    pub(crate) slots: usize,
    pub(crate) dataset: Dataset,
    pub(crate) training_data: String,
    pub(crate) epochs: u32,
    pub(crate) max_steps: Option<u64>,
    pub(crate) batch: Batch,
    pub(crate) seed: u64,
    /// The order that the positions in the ledger refer to.
    pub(crate) order: OrderName,
    /// What decides which model is best; `None` if nothing is evaluated.
    pub(crate) best_metric: Option<BestMetric>,
    /// The program of this process; `None` if it is not known yet.
    pub(crate) program: Option<Program>,
    /// The model's tables, whose initial rows depend on the job's seed.
    pub(crate) tables: Vec<Table>,
    /// Whether the optimizer's state is divided over the workers.
    pub(crate) shards_optimizer: bool,
    /// Whether the parameters are divided with it, as the workers have them in bf16 alone.
    pub(crate) chunks_have_parameters: bool,
    /// Number of floats of the optimizer's state that are not divided, but on each worker, and of
    /// the parameters, which come first, without such a state.
    pub(crate) whole: usize,
    pub(crate) first: usize,
    /// What lies where in the optimizer's state of a program.
    pub(crate) parts: Vec<StatePart>,
}

impl JobFingerprint {
    /// How the optimizer's state is divided, if it is.
    pub(super) fn layout(&self) -> ChunkLayout {
        let more = usize::from(self.chunks_have_parameters);
        let with_state = (self.parameters - self.first).max(1);
        let slots = (self.slots - self.whole) / with_state;
        ChunkLayout::new(self.parameters, slots + more).from(self.first)
    }

    /// Number of floats that the ranks write in equal parts.
    pub(super) fn floats(&self) -> usize {
        let parameters = if self.chunks_have_parameters { 0 } else { self.parameters };
        parameters + if self.shards_optimizer { self.whole } else { self.slots }
    }
}

/// What decides which model is best. Values of other metrics or other records do not compare.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BestMetric {
    pub(crate) name: String,
    /// Whether the highest value is best, instead of the lowest.
    pub(crate) highest: bool,
    /// Number of records of the validation data.
    pub(crate) records: u64,
}

impl From<&Plan> for BestMetric {
    fn from(plan: &Plan) -> Self {
        Self { name: plan.metric.clone(), highest: plan.highest, records: plan.records }
    }
}

/// A checkpoint's manifest. Its field names are a public format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Manifest {
    /// [`FORMAT`], or [`FORMAT_OF_CHUNKED_PARAMETERS`].
    pub(super) format: String,
    pub(super) job: String,
    pub(super) run: String,
    /// Time of writing: seconds since 1970, by the clock of the worker that wrote it.
    pub(super) written_at: u64,
    pub(super) state: StateRecord,
    /// Number of parameters.
    pub(super) parameters: u64,
    /// Number of floats of the optimizer state.
    pub(super) slots: u64,
    pub(super) options: Options,
    /// The program that wrote the checkpoint.
    pub(super) program: Option<Program>,
    pub(super) files: Vec<DataFile>,
    pub(super) shards: Vec<Shard>,
    /// Rows of tables, if the model has any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) rows: Option<TableRows>,
    /// The optimizer's state, if the job divides it over its workers: the shards above have the
    /// parameters alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) optimizer: Option<ChunkedSlots>,
    /// What lies where in the optimizer's state, if a program says so. Where it is divided, those
    /// floats come first that are in chunks: `[slots, parameters with state]`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) parts: Vec<StatePart>,
}

/// The job's options, for users. What must match is checked elsewhere.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Options {
    pub(super) training_data: String,
    pub(super) epochs: u32,
    pub(super) max_steps: Option<u64>,
    pub(super) global_batch_size: Option<u64>,
    pub(super) minibatch_size: Option<u64>,
    pub(super) seed: u64,
    /// The order that the positions in the ledger refer to.
    pub(super) order: OrderName,
    /// What the best evaluation in the state is about.
    pub(super) best_metric: Option<BestMetric>,
}

/// A file of the data set whose records the ledger counts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct DataFile {
    pub(super) path: String,
    pub(super) records: u64,
}

/// A shard of the state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Shard {
    pub(super) file: String,
    pub(super) bytes: u64,
    /// XXH3 digest of the file, 128 bits: 32 hexadecimal digits.
    pub(super) digest: String,
    /// First float of the shard, in the state: parameters, followed by the optimizer state.
    pub(super) start: u64,
    pub(super) end: u64,
}

impl Shard {
    /// Ranges of the shard in the parameters and in the optimizer state.
    pub(super) fn split(&self, parameters: usize) -> (Range<usize>, Range<usize>) {
        let (start, end) = (self.start as usize, self.end as usize);
        let slot_range = start.max(parameters) - parameters..end.max(parameters) - parameters;
        (start.min(parameters)..end.min(parameters), slot_range)
    }
}

impl Manifest {
    pub(super) fn new(
        fingerprint: &JobFingerprint,
        state: StateRecord,
        parts: &[Written],
        of_ranks: &[Vec<u32>],
        written_at: u64,
    ) -> Self {
        let (global, per_worker) = match fingerprint.batch {
            Batch::Global(records) => (Some(records.get()), None),
            Batch::PerWorker(records) => (None, Some(records.get())),
        };
        let total = fingerprint.floats();
        let shard = |(rank, part): (usize, &Written)| {
            let Range { start, end } = shard_range(total, rank, parts.len());
            Shard {
                file: super::name::shard(rank, parts.len()),
                bytes: part.bytes,
                digest: format!("{:032x}", part.digest),
                start: start as u64,
                end: end as u64,
            }
        };
        let has_tables = !fingerprint.tables.is_empty();
        let file = |f: &elasticdl_data::File| DataFile { path: f.path.clone(), records: f.records };
        Self {
            format: match fingerprint.chunks_have_parameters {
                true => FORMAT_OF_CHUNKED_PARAMETERS.into(),
                false => FORMAT.into(),
            },
            job: fingerprint.job.clone(),
            run: fingerprint.run.clone(),
            written_at,
            state,
            parameters: fingerprint.parameters as u64,
            slots: fingerprint.slots as u64,
            options: Options {
                training_data: fingerprint.training_data.clone(),
                epochs: fingerprint.epochs,
                max_steps: fingerprint.max_steps,
                global_batch_size: global,
                minibatch_size: per_worker,
                seed: fingerprint.seed,
                order: fingerprint.order,
                best_metric: fingerprint.best_metric.clone(),
            },
            program: fingerprint.program.clone(),
            files: fingerprint.dataset.files.iter().map(file).collect(),
            shards: parts.iter().enumerate().map(shard).collect(),
            rows: has_tables.then(|| TableRows::new(fingerprint, parts, of_ranks)),
            optimizer: fingerprint
                .shards_optimizer
                .then(|| ChunkedSlots::new(fingerprint, parts, of_ranks)),
            parts: fingerprint.parts.clone(),
        }
    }

    /// The state for a job of this fingerprint, which is that of the `same_run` or of another job.
    /// The best value of another metric, or of other validation data, says nothing about this job.
    pub(super) fn state_for(&self, fingerprint: &JobFingerprint, same_run: bool) -> StateRecord {
        let mut state = self.state.clone();
        let compares = self.options.best_metric.is_some()
            && self.options.best_metric == fingerprint.best_metric;
        if !(same_run || compares) {
            state.evaluation.best = None;
        }
        state
    }

    /// Encodes as JSON. The last field is the digest of all the text before it.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut text = serde_json::to_string(self).expect("a manifest's keys are strings");
        let digest = xxh3_128(text.as_bytes());
        text.pop();
        text.push_str(&format!("{DIGEST}{digest:032x}\"}}"));
        text.into_bytes()
    }

    /// Decodes the result of [`encode`](Self::encode).
    ///
    /// # Errors
    /// It is truncated or has changed, or its format version is unknown.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let text = str::from_utf8(bytes).map_err(|_| "it is not UTF-8 text")?;
        let (head, digest) = text
            .rsplit_once(DIGEST)
            .ok_or("it has no digest: it is truncated, or not a manifest")?;
        let whole = format!("{head}}}");
        if digest != format!("{:032x}\"}}", xxh3_128(whole.as_bytes())) {
            return Err("its digest does not match: it has changed".into());
        }
        let manifest: Self = serde_json::from_str(&whole).map_err(|error| error.to_string())?;
        if ![FORMAT, FORMAT_OF_CHUNKED_PARAMETERS].contains(&&*manifest.format) {
            return Err(format!(
                "its format is `{}`; this program reads `{FORMAT}` and \
                 `{FORMAT_OF_CHUNKED_PARAMETERS}`",
                manifest.format
            ));
        }
        manifest.check_shards()?;
        manifest.check_parts()?;
        manifest.rows.as_ref().map_or(Ok(()), TableRows::check)?;
        Ok(manifest)
    }

    /// Checks that the shards cover the state without gaps.
    fn check_shards(&self) -> Result<(), String> {
        let mut at = 0;
        for Shard { file, bytes, start, end, .. } in &self.shards {
            let floats = end.checked_sub(*start).filter(|_| *start == at);
            if floats.is_none_or(|floats| floats.saturating_mul(4) > *bytes) {
                return Err(format!(
                    "{file} contains floats {start}..{end} in {bytes} bytes, after {at}"
                ));
            }
            at = *end;
        }
        let chunked = self.optimizer.as_ref();
        let has_parameters = chunked.is_none_or(|chunked| !chunked.has_parameters);
        let parameters = if has_parameters { self.parameters } else { 0 };
        let slots = chunked.map_or(self.slots, |chunked| chunked.whole);
        if parameters.checked_add(slots) != Some(at) {
            return Err(format!("its shards end at float {at}"));
        }
        chunked.map_or(Ok(()), |chunked| chunked.check(self.parameters, self.slots))
    }

    /// Checks that the job's model and data match this state.
    ///
    /// # Errors
    /// A message that explains what is different, and what is expected.
    pub(super) fn check_model_and_data(&self, fingerprint: &JobFingerprint) -> Result<(), String> {
        let parameters = fingerprint.parameters as u64;
        if self.parameters != parameters {
            let had = self.parameters;
            return Err(format!("its model has {had} parameters, and this one has {parameters}"));
        }
        self.check_state(fingerprint)?;
        match &self.rows {
            Some(rows) => rows.check_job(fingerprint)?,
            None if fingerprint.tables.is_empty() => {}
            None => return Err("it has no tables, and this model has".into()),
        }
        let same = |(a, b): (&DataFile, &elasticdl_data::File)| {
            // The folder may differ between machines; the order of the files may not.
            Path::new(&a.path).file_name() == Path::new(&b.path).file_name()
                && a.records == b.records
        };
        let files = &fingerprint.dataset.files;
        if self.files.len() != files.len() {
            let (had, has) = (self.files.len(), files.len());
            let files = counted(had as u64, "file");
            return Err(format!("its data set has {files}, and this one has {has}"));
        }
        match self.files.iter().zip(files).find(|pair| !same(*pair)) {
            None => self.check_order(fingerprint.order),
            Some((a, b)) => Err(format!(
                "its data set has {} with {} where this one has {} with {}; both must use the same \
                 data",
                a.path,
                counted(a.records, "record"),
                b.path,
                b.records
            )),
        }
    }

    /// Checks that the positions in the ledger mean the same records to the job.
    fn check_order(&self, order: OrderName) -> Result<(), String> {
        if self.state.ranges.is_empty() || self.options.order == order {
            return Ok(());
        }
        let epoch = self.state.epochs_complete + 1;
        let had = self.options.order;
        Err(format!(
            "it lies within epoch {epoch}, whose records are in the order of {had}, and this job's \
             are in that of {order}; give the same options, or resume from the end of an epoch"
        ))
    }

    /// Checks that a new job with these options has something left to train.
    ///
    /// # Errors
    /// A message that explains what prevents it, and what the user should change.
    pub(super) fn check_options(&self, fingerprint: &JobFingerprint) -> Result<(), String> {
        let StateRecord { step, epochs_complete, ranges, .. } = &self.state;
        let reached = ranges
            .iter()
            .map(|r| r.epoch.saturating_add(1))
            .max()
            .unwrap_or(0)
            .max(*epochs_complete);
        if reached > fingerprint.epochs || *epochs_complete == fingerprint.epochs {
            return Err(format!(
                "it has already trained {}; --num-epochs {} must be at least {}",
                if reached > *epochs_complete {
                    format!("into epoch {reached}")
                } else {
                    counted(u64::from(*epochs_complete), "epoch")
                },
                fingerprint.epochs,
                reached.max(epochs_complete.saturating_add(1)),
            ));
        }
        match fingerprint.max_steps.filter(|max| step >= max) {
            None => Ok(()),
            Some(max) => Err(format!(
                "it is already at step {step}; --max-steps {max} must be larger than that"
            )),
        }
    }
}

/// A number with its noun.
fn counted(number: u64, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// The floats of the state's `total` that `rank` writes.
pub(super) fn shard_range(total: usize, rank: usize, world_size: usize) -> Range<usize> {
    let at = |rank: usize| (total as u128 * rank as u128 / world_size as u128) as usize;
    at(rank)..at(rank + 1)
}

pub(super) const FORMAT: &str = "elasticdl checkpoint 1";
/// The parameters are in the chunks of the optimizer's state.
pub(super) const FORMAT_OF_CHUNKED_PARAMETERS: &str = "elasticdl checkpoint 2";

const DIGEST: &str = ",\"digest\":\"";

/// Adds the digest to the text of a manifest, whatever the text is.
#[cfg(feature = "simulation")]
pub(super) fn with_digest(whole: &[u8]) -> Vec<u8> {
    let digest = format!("{DIGEST}{:032x}\"}}", xxh3_128(whole));
    [whole.strip_suffix(b"}").unwrap_or(whole), digest.as_bytes()].concat()
}

#[cfg(test)]
pub(super) mod tests {
    use std::num::NonZeroU64;

    use elasticdl_proto::{RecordRange, ShuffleMode};

    use elasticdl_data::File;

    use super::*;

    pub(in super::super) fn fingerprint() -> JobFingerprint {
        let file = |path: &str, records| File::new(path, records);
        JobFingerprint {
            job: "mnist".into(),
            run: "7f3a9c21".into(),
            parameters: 10,
            slots: 20,
            dataset: Dataset::new(vec![file("data/a.csv", 60), file("data/b.csv", 40)]),
            training_data: "data".into(),
            epochs: 3,
            max_steps: None,
            batch: Batch::Global(NonZeroU64::new(4).unwrap()),
            seed: 7,
            order: order(7),
            best_metric: None,
            program: None,
            tables: Vec::new(),
            shards_optimizer: false,
            chunks_have_parameters: false,
            whole: 0,
            first: 0,
            parts: Vec::new(),
        }
    }

    fn order(seed: u64) -> OrderName {
        OrderName { mode: ShuffleMode::Block, seed, block: 8, buffer: 64 }
    }

    pub(in super::super) fn state_at(step: u64) -> StateRecord {
        let ranges = vec![RecordRange { epoch: 1, start: 0, end: 4 * step - 100 }];
        StateRecord {
            step,
            records_trained: 4 * step,
            epochs_complete: 1,
            ranges,
            ..StateRecord::default()
        }
    }

    fn manifest() -> Manifest {
        let part = |floats: u64| Written { bytes: 128 + 4 * floats, ..Written::default() };
        Manifest::new(&fingerprint(), state_at(30), &[part(10); 3], &[], 1_700_000_000)
    }

    #[test]
    fn a_manifest_is_read_back_and_is_json() {
        let manifest = manifest();
        let bytes = manifest.encode();
        assert_eq!(Manifest::decode(&bytes), Ok(manifest));
        let json: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(json["shards"][1]["start"], 10);
        assert_eq!(json["digest"].as_str().map(str::len), Some(32));
    }

    #[test]
    fn a_manifest_names_the_program_that_wrote_it_and_those_of_older_releases_are_read() {
        let program = |optimizer| {
            let version = "1.0".into();
            Some(Program { executable: 1, optimizer, version, ..Program::default() })
        };
        let of = |program| JobFingerprint { program, ..fingerprint() };
        let wrote = Manifest::new(&of(program(2)), state_at(30), &[], &[], 1);
        assert_eq!(wrote.differences(&of(program(2))), [""; 0]);
        assert_eq!(wrote.differences(&of(program(3))), ["optimizer settings"]);
        let parts = vec![StatePart { name: "m".into(), at: 0, len: 1, fill: None }];
        let interpreted = JobFingerprint { parts, ..of(program(3)) };
        let counted = "optimizer settings (those in the checkpoint count)";
        assert_eq!(wrote.differences(&interpreted), [counted]);
        let mut json = serde_json::to_value(manifest()).unwrap();
        json.as_object_mut().unwrap().remove("program").unwrap();
        json["options"].as_object_mut().unwrap().remove("best_metric").unwrap();
        let older: Manifest = serde_json::from_value(json).unwrap();
        assert_eq!(older, manifest());
        assert_eq!(older.differences(&of(program(3))), [""; 0]);
    }

    #[test]
    fn the_best_value_is_kept_if_the_other_job_measures_the_same() {
        let metric = |name: &str, records| {
            let name = name.into();
            Some(BestMetric { name, highest: false, records })
        };
        let of = |best_metric| JobFingerprint { best_metric, ..fingerprint() };
        let best = Some((20, 0.5));
        let mut state = state_at(30);
        state.evaluation.best = best;
        let kept = |wrote: &Manifest, reads, same_run| {
            wrote.state_for(&of(reads), same_run).evaluation.best == best
        };
        let wrote = Manifest::new(&of(metric("loss", 600)), state.clone(), &[], &[], 1);
        assert!(kept(&wrote, metric("loss", 600), false));
        assert!(!kept(&wrote, metric("loss", 700), false));
        assert!(!kept(&wrote, metric("accuracy", 600), false) && !kept(&wrote, None, false));
        let older = Manifest::new(&of(None), state, &[], &[], 1);
        assert!(!kept(&older, None, false) && !kept(&older, metric("loss", 600), false));
        assert!(kept(&older, metric("loss", 600), true));
    }

    #[test]
    fn every_flipped_bit_and_every_truncation_is_detected() {
        let bytes = manifest().encode();
        for at in 0..bytes.len() {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << (at % 8);
            assert!(Manifest::decode(&flipped).is_err(), "byte {at}");
            assert!(Manifest::decode(&bytes[..at]).is_err(), "cut at {at}");
        }
    }

    #[test]
    fn shards_that_do_not_cover_the_state_are_refused() {
        let changed = |change: fn(&mut Manifest)| {
            let mut manifest = manifest();
            change(&mut manifest);
            Manifest::decode(&manifest.encode()).unwrap_err()
        };
        assert!(changed(|m| m.shards[1].start = 9).contains("after 10"));
        assert!(changed(|m| m.shards[1].end = 19).contains("after 19"));
        assert!(changed(|m| m.shards[2].bytes = 39).contains("in 39 bytes"));
        assert!(changed(|m| drop(m.shards.pop())).contains("end at float 20"));
        assert!(changed(|m| m.format = "elasticdl checkpoint 3".into()).contains("checkpoint 3"));
    }

    #[test]
    fn a_different_model_or_data_set_is_refused_with_the_difference() {
        let refused = |change: fn(&mut JobFingerprint)| {
            let mut fingerprint = fingerprint();
            change(&mut fingerprint);
            manifest().check_model_and_data(&fingerprint).err().unwrap_or_default()
        };
        assert_eq!(refused(|f| f.dataset.files[0].path = "/mnt/a.csv".into()), "");
        assert!(refused(|f| f.parameters = 11).contains("10 parameters, and this one has 11"));
        assert!(refused(|f| f.slots = 10).contains("has 20 floats, and this one has 10"));
        assert!(refused(|f| drop(f.dataset.files.pop())).contains("2 files, and this one has 1"));
        assert!(refused(|f| f.dataset.files[1].records = 41).contains("data/b.csv with 41"));
        assert!(refused(|f| f.dataset.files.swap(0, 1)).contains("data/a.csv with 60"));
    }

    #[test]
    fn another_order_is_refused_within_an_epoch_only() {
        let check = |manifest: &Manifest, order: OrderName| {
            let fingerprint = JobFingerprint { order, ..fingerprint() };
            manifest.check_model_and_data(&fingerprint).err().unwrap_or_default()
        };
        let mut manifest = manifest();
        assert_eq!(check(&manifest, order(7)), "");
        let refused = check(&manifest, order(8));
        let blocks = "--shuffle block:64 --seed 7, in blocks of 8 records";
        assert!(refused.contains("within epoch 2") && refused.contains(blocks), "{refused}");
        manifest.state.ranges.clear();
        assert_eq!(check(&manifest, order(8)), "");
    }

    #[test]
    fn options_that_leave_nothing_to_train_are_refused_with_what_to_change() {
        let refused = |change: fn(&mut JobFingerprint)| {
            let mut fingerprint = fingerprint();
            change(&mut fingerprint);
            manifest().check_options(&fingerprint).err().unwrap_or_default()
        };
        assert_eq!(
            refused(|f| (f.epochs, f.max_steps, f.batch) =
                (2, Some(31), Batch::PerWorker(NonZeroU64::new(9).unwrap()))),
            ""
        );
        assert!(refused(|f| f.epochs = 1).contains("--num-epochs 1"));
        assert!(refused(|f| f.max_steps = Some(30)).contains("--max-steps 30"));
    }

    #[test]
    fn shards_cover_the_state() {
        for (total, world_size) in [(10, 3), (2, 5), (0, 2), (usize::MAX / 8, 7)] {
            let mut at = 0;
            for rank in 0..world_size {
                let Range { start, end } = shard_range(total, rank, world_size);
                assert!(start == at && end >= start);
                at = end;
            }
            assert_eq!(at, total);
        }
    }
}
