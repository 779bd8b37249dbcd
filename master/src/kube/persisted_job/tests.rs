use std::sync::Arc;

use serde_json::json;

use super::super::anchor::{Anchor, FILES, INCARNATION};
use super::super::testing::FakeServer;
use super::*;
use crate::job::testing::{largest, spec};
use crate::job::{Job, JobSpec};
use elasticdl_proto::WorkerOptions;

/// A server with the anchor of a new job.
fn start() -> (Arc<FakeServer>, Anchor) {
    let (fake, cluster) = FakeServer::start();
    fake.put(
        "configmaps",
        "job",
        json!({"metadata": {"name": "job", "uid": "u1"}, "data": {"task": "{}"}}),
    );
    (fake, Anchor::new(&cluster, "job"))
}

/// Starts the next incarnation of the job's master.
async fn begin(anchor: &Anchor) -> AnchorWriter {
    let seen = anchor.read().await.unwrap();
    let before =
        seen.data.as_ref().unwrap().get(INCARNATION).map_or(0, |text| text.parse().unwrap());
    AnchorWriter::begin(anchor, &seen, before + 1).await.unwrap()
}

fn writer(writer: AnchorWriter) -> PersistedJobWriter {
    PersistedJobWriter::new(writer, LeaseGuard::unlimited(), EventRecorder::disabled(), None)
}

fn anchor_key(fake: &FakeServer, key: &str) -> Option<String> {
    Some(fake.state().object("configmaps", "job")?["data"][key].as_str()?.to_owned())
}

fn seed(fake: &FakeServer) -> Option<u64> {
    anchor_key(fake, RECORD).map(|text| read(&text).unwrap().spec().options.seed)
}

fn writes(fake: &FakeServer) -> usize {
    fake.state().count("PATCH configmaps")
}

/// A job that is identified by its seed.
fn job_with_seed(seed: u64) -> PersistedJob {
    Job::new(JobSpec { options: WorkerOptions { seed, ..spec().options }, ..spec() }).to_persisted()
}

async fn persisted(writer: &mut PersistedJobWriter, revision: u64) {
    while writer.persisted() < revision {
        assert_eq!(writer.changed().await, None);
    }
}

#[tokio::test(start_paused = true)]
async fn the_newest_state_is_written_once_a_second_and_an_awaited_one_at_once() {
    let (fake, anchor) = start();
    let mut writer = writer(begin(&anchor).await);
    let begun = writes(&fake);
    let start = Instant::now();
    writer.submit(1, 0, job_with_seed(1));
    persisted(&mut writer, 1).await;
    assert!(start.elapsed() < Duration::from_millis(100));
    assert_eq!(seed(&fake), Some(1));
    writer.submit(2, 0, job_with_seed(2));
    writer.submit(3, 0, job_with_seed(3));
    persisted(&mut writer, 3).await;
    assert!(start.elapsed() >= INTERVAL);
    assert_eq!((seed(&fake), writes(&fake) - begun), (Some(3), 2));
    writer.submit(4, 4, job_with_seed(4));
    let before = Instant::now();
    persisted(&mut writer, 4).await;
    assert!(before.elapsed() < Duration::from_millis(100));
    assert_eq!(seed(&fake), Some(4));
}

#[tokio::test(start_paused = true)]
async fn an_unreachable_server_gets_the_newest_state_later_and_one_error_is_reported() {
    let (fake, anchor) = start();
    let mut writer = writer(begin(&anchor).await);
    fake.state().throttles.extend([("PATCH configmaps", 500, 0); 3]);
    writer.submit(1, 1, job_with_seed(1));
    let Some(PersistError::Retrying(why)) = writer.changed().await else {
        panic!("no error was reported")
    };
    assert!(why.contains("too many requests"), "{why}");
    assert_eq!((writer.persisted(), seed(&fake)), (0, None));
    writer.submit(2, 1, job_with_seed(2));
    let mut all = writer.watch();
    all.flush(Duration::from_secs(60)).await;
    assert_eq!((writer.persisted(), seed(&fake)), (2, Some(2)));
    assert_eq!(writer.changed().await, None);
    // The wait has a time limit.
    fake.state().unreachable = true;
    writer.submit(3, 3, job_with_seed(3));
    let before = Instant::now();
    all.flush(Duration::from_secs(3)).await;
    assert_eq!((before.elapsed(), writer.persisted()), (Duration::from_secs(3), 2));
}

#[tokio::test(start_paused = true)]
async fn a_permanent_refusal_is_reported_and_ends_the_waiting() {
    for code in [413, 422, 400] {
        let (fake, anchor) = start();
        let mut writer = writer(begin(&anchor).await);
        fake.state().throttles.push_back(("PATCH configmaps", code, 0));
        writer.submit(1, 1, job_with_seed(1));
        let Some(PersistError::Refused(why)) = writer.changed().await else {
            panic!("{code}: no error was reported")
        };
        assert!(why.contains("the API server answered: too many requests"), "{why}");
        // The job's end is submitted, too, and must not wait.
        let before = writes(&fake);
        writer.submit(2, 2, job_with_seed(2));
        assert!(writer.persisted() >= 2);
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(writes(&fake), before, "{code}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_missing_permission_is_reported_and_retried() {
    let (fake, anchor) = start();
    let mut writer = writer(begin(&anchor).await);
    fake.state().throttles.push_back(("PATCH configmaps", 403, 0));
    writer.submit(1, 1, job_with_seed(1));
    let Some(PersistError::Retrying(why)) = writer.changed().await else {
        panic!("no error was reported")
    };
    assert!(why.contains("manifests/rbac.yaml"), "{why}");
    persisted(&mut writer, 1).await;
    assert_eq!(seed(&fake), Some(1));
}

#[tokio::test(start_paused = true)]
async fn a_write_of_a_replaced_master_changes_nothing() {
    let (fake, anchor) = start();
    let first = begin(&anchor).await;
    let mut old = writer(first.clone());
    old.submit(1, 1, job_with_seed(1));
    persisted(&mut old, 1).await;
    let mut new = writer(begin(&anchor).await);
    // The old master still considers its Lease valid: the API server is slow, or the master's clock
    // was stopped.
    old.submit(2, 2, job_with_seed(2));
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!((old.persisted(), seed(&fake)), (1, Some(1)));
    new.submit(1, 1, job_with_seed(3));
    persisted(&mut new, 1).await;
    old.submit(3, 3, job_with_seed(4));
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!((old.persisted(), seed(&fake)), (1, Some(3)));
    // It writes no status and no summary either.
    let data = Data::from([("summary".into(), "{}".into())]);
    assert_eq!(first.write(&data).await, Err(WriteError::Fenced));
    assert_eq!(anchor_key(&fake, "summary"), None);
}

#[tokio::test(start_paused = true)]
async fn of_two_masters_that_read_the_same_anchor_one_starts() {
    let (fake, anchor) = start();
    let seen = anchor.read().await.unwrap();
    // A concurrent write of the user is not another master's.
    anchor.write(&Data::from([("num-workers".into(), "3".into())])).await.unwrap();
    let first = AnchorWriter::begin(&anchor, &seen, 1).await.unwrap();
    assert_eq!(
        AnchorWriter::begin(&anchor, &anchor.read().await.unwrap(), 2).await.map(|_| ()),
        Ok(())
    );
    assert_eq!(AnchorWriter::begin(&anchor, &seen, 1).await.map(|_| ()), Err(WriteError::Fenced));
    assert_eq!(
        first.write(&Data::from([("status".into(), "{}".into())])).await,
        Err(WriteError::Fenced)
    );
    assert_eq!(
        (anchor_key(&fake, INCARNATION).unwrap(), anchor_key(&fake, "num-workers").unwrap()),
        ("2".into(), "3".into())
    );
}

#[tokio::test(start_paused = true)]
async fn the_list_of_files_is_written_once_and_before_the_job_that_refers_to_it() {
    let (fake, anchor) = start();
    let mut writer = writer(begin(&anchor).await);
    let begun = writes(&fake);
    let record = largest().to_persisted();
    for revision in 1..=3 {
        writer.submit(revision, revision, record.clone());
        persisted(&mut writer, revision).await;
        assert_eq!(writes(&fake) - begun, 1 + revision as usize);
    }
    assert!(anchor_key(&fake, FILES).unwrap().starts_with("{\"packed\":"));
    let mut read = read(&anchor_key(&fake, RECORD).unwrap()).unwrap();
    read.attach_file_list(record.file_list().unwrap().clone()).unwrap();
    assert!(read == record);
}

#[test]
fn the_largest_job_is_compressed_and_leaves_space_for_the_other_keys() {
    let record = largest().to_persisted();
    let text = write(record.clone()).unwrap();
    assert!(text.starts_with("{\"version\":4,\"release\":"), "{}", &text[..60]);
    assert!(text.len() < JOB_BYTES_MAX / 2, "{} KiB", text.len() >> 10);
    let mut read = read(&text).unwrap();
    read.attach_file_list(record.file_list().unwrap().clone()).unwrap();
    assert!(read == record);
}

#[test]
fn a_job_of_this_format_is_read_and_others_are_refused_with_what_to_do() {
    let text = write(job_with_seed(7)).unwrap();
    assert_eq!(read(&text), Ok(job_with_seed(7)));
    let error = read("{\"version\": 5, \"release\": \"9.0.0\", \"anything\": [1]}").unwrap_err();
    assert!(error.contains("format 5 (elasticdl 9.0.0)"), "{error}");
    for old in ["{\"version\": 2}", "{\"version\": 1, \"packed\": \"AAAA\"}"] {
        assert!(read(old).unwrap_err().contains("finish it with"), "{old}");
    }
    assert!(
        read("{}").is_err()
            && read("").is_err()
            && read("{\"version\": 4, \"packed\": \"AAAA\"}").is_err()
    );
}

#[test]
fn a_job_that_unpacks_to_more_than_any_has_is_refused_before_it_takes_the_memory() {
    let spaces = std::io::repeat(b' ').take(UNPACKED_BYTES_MAX + 2);
    let packed = BASE64.encode(zstd::encode_all(spaces, 1).unwrap());
    assert!(packed.len() < 64 << 10, "{}", packed.len());
    assert_eq!(unpack(&packed), Err("it is damaged: no job takes 64 MiB".into()));
}

#[tokio::test(start_paused = true)]
async fn the_holder_of_the_lease_writes_its_incarnation_again_and_another_master_does_not() {
    for edited in [json!(null), json!("abc"), json!("77")] {
        let (fake, anchor) = start();
        let (guard, renew) = LeaseGuard::for_test();
        let lifetime = Duration::from_secs(200 * 365 * 24 * 3600);
        let begun = begin(&anchor).await;
        let recorder = EventRecorder::disabled();
        let mut writer = PersistedJobWriter::new(begun, guard, recorder, None);
        let mut object = fake.state().object("configmaps", "job").unwrap();
        match &edited {
            serde_json::Value::Null => {
                drop(object["data"].as_object_mut().unwrap().remove(INCARNATION))
            }
            text => object["data"][INCARNATION] = text.clone(),
        }
        fake.put("configmaps", "job", object);
        writer.submit(1, 1, job_with_seed(7));
        // Until the Lease is renewed, another master may have begun.
        let waiting = timeout(Duration::from_secs(60), writer.changed()).await;
        assert!(waiting.is_err() && seed(&fake).is_none(), "{edited}");
        renew(lifetime);
        persisted(&mut writer, 1).await;
        assert_eq!(seed(&fake), Some(7), "{edited}");
        assert_eq!(anchor_key(&fake, INCARNATION).as_deref(), Some("1"), "{edited}");
    }
}
