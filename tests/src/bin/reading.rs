//! A model without parameters to learn, over any of the readers: to test data that can't be used,
//! and to measure how fast data is read.
//!
//! ```text
//! reading csv [MICROS]            a worker; each record takes MICROS microseconds
//! reading speed ELASTICDL [ROWS]  jobs that read tables from a store, nearby and 30 ms away:
//!                                 records per second, and requests
//! ```

use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use elasticdl::readers::{CsvRows, ParquetRows, TextWindows};
use elasticdl::{Gradients, Loss, Model, NamedTensor, Reader, UserError};
use elasticdl_tests::{Command, FaultRates, S3};
use parquet::data_type::{ByteArray, ByteArrayType, FloatType};
use parquet::errors::Result as ParquetResult;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

struct Reading<R> {
    reader: fn() -> R,
    micros_per_record: u64,
}

impl<R: Reader> Model for Reading<R> {
    type Reader = R;
    type Batch = usize;

    fn reader(&self) -> R {
        (self.reader)()
    }

    fn tensors(&self) -> Vec<NamedTensor> {
        vec![NamedTensor::new("parameter", [1])]
    }

    fn initialize(&mut self, _seed: u64, _parameters: &mut [f32]) -> Result<(), UserError> {
        Ok(())
    }

    fn feed(&mut self, records: Vec<R::Record>) -> Result<usize, UserError> {
        Ok(records.len())
    }

    fn gradients(
        &mut self,
        _parameters: &[f32],
        records: usize,
        _gradients: &mut Gradients<'_>,
    ) -> Result<Loss, UserError> {
        std::thread::sleep(Duration::from_micros(self.micros_per_record * records as u64));
        Ok(Loss::Mean(1.0))
    }
}

fn work<R: Reader>(reader: fn() -> R) -> ExitCode {
    let micros = std::env::args().nth(2).and_then(|text| text.parse().ok());
    elasticdl::run(Reading { reader, micros_per_record: micros.unwrap_or(0) })
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["csv", ..] => work(|| CsvRows::new().f32("x").f32("y").text("name")),
        ["parquet", ..] => work(|| ParquetRows::new().f32("x").f32("y").text("name")),
        ["text", ..] => work(|| TextWindows::new(4)),
        ["speed", elasticdl] => speed(elasticdl, 1_000_000),
        ["speed", elasticdl, rows] => {
            rows.parse().map_or_else(|_| ExitCode::from(2), |rows| speed(elasticdl, rows))
        }
        _ => ExitCode::from(2),
    }
}

/// Prints how fast jobs with default settings read tables of `rows` rows.
#[expect(clippy::print_stdout, reason = "it is a program")]
fn speed(elasticdl: &str, rows: usize) -> ExitCode {
    for kind in ["csv", "parquet"] {
        let mut near = None;
        for distance_ms in [0, 30] {
            let server = S3::start(FaultRates { distance_ms, ..FaultRates::default() }, 1);
            for file in 0..4 {
                let part = file * rows / 4..(file + 1) * rows / 4;
                let bytes = match kind {
                    "csv" => csv(part),
                    _ => parquet(part).expect("a vector takes any table"),
                };
                server.put(&format!("bucket/table-{file}.{kind}"), bytes);
            }
            let Some((per_s, steps)) = train(elasticdl, kind, &server) else {
                return ExitCode::FAILURE;
            };
            let part = per_s / near.get_or_insert(per_s).max(1.0) * 100.0;
            let requests = server.requests();
            println!(
                "{kind:8} {distance_ms:3} ms: {per_s:9.0} records/s ({part:3.0} %), {steps} steps, \
                 requests {requests:?}"
            );
        }
    }
    ExitCode::SUCCESS
}

/// Records per second and steps of a job on the objects of the server.
#[expect(clippy::print_stderr, reason = "it is a program")]
fn train(elasticdl: &str, kind: &str, server: &S3) -> Option<(f64, u64)> {
    let folder = tempfile::tempdir().ok()?;
    let program = [std::env::current_exe().ok()?.into_os_string(), kind.into()];
    let ended = Command::new(Path::new(elasticdl), folder.path().join("job"), program)
        .option("training-data", "s3://bucket")
        .option("num-workers", "2")
        .option("global-batch-size", "4096")
        .started_by([vec!["env".to_owned()], server.environment()].concat())
        .run();
    if ended.code != Some(0) {
        eprintln!("{}", ended.output);
        return None;
    }
    Some((ended.summary().throughput.records_per_s, ended.summary().steps))
}

fn csv(rows: std::ops::Range<usize>) -> Vec<u8> {
    let mut text = "x,name,y\n".to_owned();
    for row in rows {
        let _ = writeln!(text, "{row}.25,\"the name of row {row}, and more\",{}.5", row % 1000);
    }
    text.into_bytes()
}

fn parquet(rows: std::ops::Range<usize>) -> ParquetResult<Vec<u8>> {
    let schema =
        "message table { required float x; required binary name (UTF8); required float y; }";
    let properties = Arc::new(WriterProperties::builder().set_dictionary_enabled(false).build());
    let mut file =
        SerializedFileWriter::new(Vec::new(), Arc::new(parse_message_type(schema)?), properties)?;
    let all: Vec<usize> = rows.collect();
    for rows in all.chunks(100_000) {
        let mut group = file.next_row_group()?;
        let floats = |value: fn(usize) -> f32| Vec::from_iter(rows.iter().map(|&row| value(row)));
        let names = rows
            .iter()
            .map(|row| ByteArray::from(format!("the name of row {row}, and more").as_str()));
        let names = Vec::from_iter(names);
        for place in 0..3 {
            let Some(mut column) = group.next_column()? else { break };
            match place {
                0 => column.typed::<FloatType>().write_batch(
                    &floats(|row| row as f32),
                    None,
                    None,
                )?,
                1 => column.typed::<ByteArrayType>().write_batch(&names, None, None)?,
                _ => column.typed::<FloatType>().write_batch(
                    &floats(|row| (row % 1000) as f32),
                    None,
                    None,
                )?,
            };
            column.close()?;
        }
        group.close()?;
    }
    file.into_inner()
}
