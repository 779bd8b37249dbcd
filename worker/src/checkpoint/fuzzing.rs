//! Entry point of the fuzzers: a checkpoint whose manifest has any content.

use std::fs;
use std::num::NonZeroU64;
use std::path::Path;

use elasticdl_data::storage::Storage;
use elasticdl_data::{Dataset, File};
use elasticdl_proto::{Batch, Ledger, OrderName, ShuffleMode};

use super::load::{self, load_parameters};
use super::manifest::{JobFingerprint, Manifest, with_digest};
use super::name::{self, MANIFEST};

/// Loads a checkpoint of six parameters with this manifest, to which its digest is added. Returns
/// whether a job could resume from the manifest.
pub(crate) fn fuzz_manifest(folder: &Path, manifest: &[u8]) -> bool {
    let manifest = with_digest(manifest);
    let write = |name: &str, data: &[u8]| {
        fs::write(folder.join(name), data).expect("the caller passes a folder for the files");
    };
    write(MANIFEST, &manifest);
    write(&name::shard(0, 1), &[0; 80]);
    let storage = Storage::open(&folder.display().to_string()).expect("the folder exists");
    // The digests of the shards match in no input.
    let _ = load_parameters(&storage, &mut [0.0; 6]);
    let job = fingerprint();
    let _ = load::load(&storage, &job, &mut [0.0; 6], &mut [0.0; 12], true);
    let Ok(manifest) = Manifest::decode(&manifest) else { return false };
    let ranges = manifest.state.ranges.iter().copied();
    let ledger =
        Ledger::from_parts(100, manifest.state.epochs_complete, ranges, manifest.state.repeated);
    manifest.check_model_and_data(&job).is_ok()
        && manifest.check_options(&job).is_ok()
        && ledger.is_ok()
}

fn fingerprint() -> JobFingerprint {
    JobFingerprint {
        job: "mnist".into(),
        run: "7f3a9c21".into(),
        parameters: 6,
        slots: 12,
        dataset: Dataset::new(vec![File::new("a.csv", 60), File::new("b.csv", 40)]),
        training_data: "data".into(),
        epochs: 3,
        max_steps: Some(1000),
        batch: Batch::Global(NonZeroU64::MIN),
        seed: 7,
        order: OrderName { mode: ShuffleMode::Record, seed: 7, block: 0, buffer: 0 },
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
