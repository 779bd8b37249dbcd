//! Data sets for the counting models.

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use elasticdl::readers::FixedRecords;
use elasticdl::{DataError, UserError};
use elasticdl_data::worker::with_patience;
use rustix::io::Errno;
use safetensors::SafeTensors;

/// Writes `records` records over `files` files into `folder`: record `i` holds the number `i`.
pub fn counting_data(folder: &Path, records: u64, files: u64) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    for file in 0..files {
        let range = records * file / files..records * (file + 1) / files;
        let bytes: Vec<u8> = range.flat_map(u64::to_le_bytes).collect();
        std::fs::File::create(folder.join(format!("part-{file:03}.bin")))?.write_all(&bytes)?;
    }
    Ok(())
}

/// Reads the records of [`counting_data`].
pub fn counting_reader() -> FixedRecords {
    FixedRecords::new(size_of::<u64>())
}

/// The record. If there is a file that the variable `REFUSED` names, waits a while for its removal
/// and then fails, as if storage refused access: for all workers, or for the launch that the file
/// contains.
pub fn unless_refused(record: Vec<u8>) -> Result<Vec<u8>, DataError> {
    let Some(file) = std::env::var_os("REFUSED") else { return Ok(record) };
    let launch = std::env::var("ELASTICDL_LAUNCH").unwrap_or_default();
    let request = || match std::fs::read_to_string(&file) {
        Ok(refused) if refused.is_empty() || refused == launch => {
            Err(std::io::Error::from_raw_os_error(Errno::ACCESS.raw_os_error()))
        }
        Ok(_) | Err(_) => Ok(()),
    };
    let wait = |error| {
        let sleep = |pause| {
            std::thread::sleep(pause);
            false
        };
        with_patience("the data", Duration::from_secs(3), error, request, sleep)
    };
    let read = request().or_else(wait).map(|()| record);
    read.map_err(|source| DataError::Io { path: file.clone().into(), source })
}

/// The numbers that these records hold.
pub fn numbers(records: Vec<Vec<u8>>) -> Result<Vec<u64>, UserError> {
    records.into_iter().map(|bytes| Ok(u64::from_le_bytes(bytes.as_slice().try_into()?))).collect()
}

/// The part of an `impl Model` that the models over [`counting_data`] share: its records, and
/// parameters that are zero at first.
#[macro_export]
macro_rules! read_counting_data {
    () => {
        type Reader = elasticdl::Map<elasticdl::readers::FixedRecords, Vec<u8>>;
        type Batch = Vec<u64>;

        fn reader(&self) -> Self::Reader {
            elasticdl::Reader::map($crate::counting_reader(), $crate::unless_refused)
        }

        fn initialize(
            &mut self,
            _seed: u64,
            parameters: &mut [f32],
        ) -> Result<(), elasticdl::UserError> {
            parameters.fill(0.0);
            Ok(())
        }

        fn feed(&mut self, records: Vec<Vec<u8>>) -> Result<Vec<u64>, elasticdl::UserError> {
            $crate::numbers(records)
        }
    };
}

/// The parameters that a job of the counting model has exported to a file: the count of each
/// record.
pub fn exported_counts(path: &Path) -> Vec<f32> {
    let bytes = std::fs::read(path).expect("a model was exported");
    let file = SafeTensors::deserialize(&bytes).expect("an exported model is a safetensors file");
    assert_eq!(file.names(), ["parameters"]);
    let data = file.tensor("parameters").expect("the name is in the file").data();
    let floats = data.chunks_exact(size_of::<f32>());
    floats.map(|bytes| f32::from_le_bytes(bytes.try_into().expect("four bytes"))).collect()
}

/// The summary line of a model whose parameters count records: the lowest and the highest count,
/// and their sum.
pub fn counts_summary(counts: &[f32]) -> String {
    let least = counts.iter().copied().fold(f32::INFINITY, f32::min);
    let most = counts.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = counts.iter().map(|&count| f64::from(count)).sum();
    format!("{least} {most} {total}")
}
