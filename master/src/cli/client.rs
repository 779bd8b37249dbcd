//! `elasticdl status` and `elasticdl scale`: questions to a running master.

use std::fmt::Write as _;
use std::io::{Write as _, stdout};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use elasticdl_proto::v1;
use serde::Serialize;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use v1::master_client::MasterClient;

use super::{EXIT_OK, Failure, plan};
use crate::jobdir::{self, LookupError};
use crate::progress::{one_line, short};
use crate::token::Token;

/// What `elasticdl status` is told.
#[derive(Args, Debug)]
pub struct StatusArgs {
    /// The job's name, or the path of its directory (with a `/`).
    #[arg(value_name = "JOB")]
    pub job: PathBuf,

    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// What `elasticdl scale` is told.
#[derive(Args, Debug)]
pub struct ScaleArgs {
    /// The job's name, or the path of its directory (with a `/`).
    #[arg(value_name = "JOB")]
    pub job: PathBuf,

    /// Workers to keep, between the job's --min-workers and --max-workers.
    #[arg(long, value_name = "N", value_parser = plan::parse_workers)]
    pub num_workers: u32,
}

/// Prints a job's status; the exit code.
pub(super) fn status(args: &StatusArgs) -> Result<u8, Failure> {
    let (mut connection, token) = Connection::open(&args.job)?;
    let reply =
        connection.ask(&token, v1::StatusRequest {}, async |client, request| client.status(request).await)?;
    print(&if args.json { to_json(reply) } else { to_text(&reply) })
}

/// Asks a job for another number of workers; the exit code.
pub(super) fn scale(args: &ScaleArgs) -> Result<u8, Failure> {
    let (mut connection, token) = Connection::open(&args.job)?;
    let request = v1::ScaleRequest { num_workers: args.num_workers };
    let reply = connection.ask(&token, request, async |client, request| client.scale(request).await)?;
    print(&format!("workers: {} -> {}\n", reply.was, args.num_workers))
}

/// A connection to a job's master, and what it needs to be used.
struct Connection {
    runtime: tokio::runtime::Runtime,
    client: MasterClient<Channel>,
    root: PathBuf,
}

impl Connection {
    fn open(job: &Path) -> Result<(Self, Token), Failure> {
        let root = directory_of(job);
        let (endpoint, token) = jobdir::look_up(&root).map_err(|error| match error {
            LookupError::NotRunning { .. } => Failure::failed(error.to_string()),
            _ => Failure::usage(error.to_string()),
        })?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|e| Failure::failed(format!("can't start the runtime: {e}")))?;
        let address = Endpoint::from_shared(format!("http://{}", endpoint.address))
            .map_err(|e| Failure::usage(format!("{}: {e}", root.display())))?
            .connect_timeout(TIMEOUT)
            .timeout(TIMEOUT);
        let channel = runtime.block_on(address.connect()).map_err(|_| {
            Failure::failed(format!(
                "the job in {} is not running: its master (process {}) does not answer at {}",
                root.display(),
                endpoint.pid,
                endpoint.address
            ))
        })?;
        Ok((Self { runtime, client: MasterClient::new(channel), root }, token))
    }

    fn ask<Q, A>(
        &mut self,
        token: &Token,
        question: Q,
        call: impl AsyncFnOnce(&mut MasterClient<Channel>, Request<Q>) -> Result<tonic::Response<A>, Status>,
    ) -> Result<A, Failure> {
        let mut request = Request::new(question);
        let bearer = token.to_bearer().parse().expect("hexadecimal digits are a valid header");
        request.metadata_mut().insert("authorization", bearer);
        let answer = self.runtime.block_on(call(&mut self.client, request));
        answer.map(tonic::Response::into_inner).map_err(|status| match status.code() {
            Code::InvalidArgument => Failure::usage(status.message()),
            _ => Failure::failed(format!(
                "the master of {} answered: {}",
                self.root.display(),
                status.message()
            )),
        })
    }
}

/// A name stands for a directory where jobs are by default.
fn directory_of(job: &Path) -> PathBuf {
    if job.as_os_str().as_encoded_bytes().contains(&b'/') || job == Path::new(".") {
        job.into()
    } else {
        jobdir::default_root().join(job)
    }
}

fn to_text(status: &v1::StatusReply) -> String {
    let mut text = String::new();
    let mut row = |name: &str, value: &str| {
        writeln!(text, "{name:<12} {value}").expect("a string takes any text");
    };
    row("job", &status.job);
    row("state", &format!("{} ({:.1} %)", status.state, status.progress * 100.0));
    let epoch = (status.epoch.saturating_add(1)).min(status.epochs);
    row("epoch", &format!("{epoch} of {}", status.epochs));
    row("step", &status.step.to_string());
    row("records", &format!("{} of {}", status.records_counted, status.records_expected));
    if let Some(loss) = status.loss {
        row("loss", &format!("{loss:.4}"));
    }
    row("speed", &format!("{} records/s", short(status.records_per_s)));
    row("generation", &status.generation.to_string());
    row("workers", &format!("{} wanted", status.workers_wanted));
    for worker in &status.workers {
        let rank = worker.rank.map_or_else(|| "-".into(), |rank| rank.to_string());
        let what = format!(
            "worker {:<4} pid {:<8} rank {rank:<4} {:<10} {:>8.1} ms/step  {} records leased",
            worker.worker,
            worker.pid,
            worker.state,
            worker.compute_us as f64 / 1000.0,
            worker.leased_records
        );
        row("", &what);
    }
    for (index, event) in status.events.iter().enumerate() {
        row(if index == 0 { "events" } else { "" }, &one_line(event));
    }
    text
}

/// The reply with the schema's field names; a public format.
#[derive(Serialize)]
struct StatusJson {
    job: String,
    state: String,
    progress: f64,
    generation: u64,
    step: u64,
    epoch: u32,
    epochs: u32,
    records_counted: u64,
    records_expected: u64,
    loss: Option<f64>,
    records_per_s: f64,
    workers_wanted: u32,
    workers: Vec<WorkerJson>,
    events: Vec<String>,
}

#[derive(Serialize)]
struct WorkerJson {
    worker: u64,
    pid: u32,
    rank: Option<u32>,
    state: String,
    compute_us: u64,
    leased_records: u64,
}

fn to_json(status: v1::StatusReply) -> String {
    let to_worker = |worker: v1::WorkerStatus| WorkerJson {
        worker: worker.worker,
        pid: worker.pid,
        rank: worker.rank,
        state: worker.state,
        compute_us: worker.compute_us,
        leased_records: worker.leased_records,
    };
    let status = StatusJson {
        job: status.job,
        state: status.state,
        progress: status.progress,
        generation: status.generation,
        step: status.step,
        epoch: status.epoch,
        epochs: status.epochs,
        records_counted: status.records_counted,
        records_expected: status.records_expected,
        loss: status.loss,
        records_per_s: status.records_per_s,
        workers_wanted: status.workers_wanted,
        workers: status.workers.into_iter().map(to_worker).collect(),
        events: status.events,
    };
    let mut json = serde_json::to_string_pretty(&status).expect("a status's keys are strings");
    json.push('\n');
    json
}

fn print(text: &str) -> Result<u8, Failure> {
    stdout()
        .write_all(text.as_bytes())
        .map_err(|e| Failure::failed(format!("can't write the answer: {e}")))?;
    Ok(EXIT_OK)
}

const TIMEOUT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    fn reply() -> v1::StatusReply {
        let worker = |worker, rank| v1::WorkerStatus {
            worker,
            pid: 70 + worker as u32,
            rank,
            state: "training".into(),
            compute_us: 1500,
            leased_records: 64,
        };
        v1::StatusReply {
            job: "mnist".into(),
            state: "running".into(),
            generation: 2,
            step: 10,
            epoch: 0,
            epochs: 3,
            records_counted: 640,
            records_expected: 1920,
            loss: Some(0.25),
            records_per_s: 20_000.0,
            workers_wanted: 2,
            workers: vec![worker(1, Some(0)), worker(2, None)],
            events: vec!["generation 2: 1 worker".into()],
            progress: 1.0 / 3.0,
        }
    }

    #[test]
    fn a_status_is_shown_whole() {
        let expected = "\
job          mnist
state        running (33.3 %)
epoch        1 of 3
step         10
records      640 of 1920
loss         0.2500
speed        20.0 k records/s
generation   2
workers      2 wanted
             worker 1    pid 71       rank 0    training        1.5 ms/step  64 records leased
             worker 2    pid 72       rank -    training        1.5 ms/step  64 records leased
events       generation 2: 1 worker
";
        assert_eq!(to_text(&reply()), expected);
    }

    #[test]
    fn json_has_null_for_what_is_not_there() {
        let json: serde_json::Value = serde_json::from_str(&to_json(reply())).unwrap();
        assert_eq!((&json["workers"][0]["rank"], &json["step"]), (&0.into(), &10.into()));
        assert!(json["workers"][1]["rank"].is_null());
    }

    #[test]
    fn a_job_with_a_slash_is_a_directory() {
        assert_eq!(directory_of(Path::new("./mnist")), Path::new("./mnist"));
        assert!(
            directory_of(Path::new("mnist")).ends_with("elasticdl/mnist")
                || directory_of(Path::new("mnist")).ends_with(".elasticdl/mnist")
        );
    }
}
