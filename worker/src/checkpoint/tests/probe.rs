//! Workers that see the folder of a job's checkpoints, and such that see another one.

use super::*;

fn is_missing(storage: &Storage, run: &str, limit: Duration) -> bool {
    Probe::is_missing(storage, run, limit, &AtomicBool::new(false)).unwrap()
}

#[test]
fn another_folder_is_told_from_that_of_the_jobs_probe_or_checkpoints() {
    let (_local, local) = folder();
    let store = Storage::within(Arc::new(InMemory::new()), Path::from("bucket"), "s3://bucket");
    for shared in [local, store] {
        let run = fingerprint().run;
        let (_other, other) = folder();
        let is_other = |storage, run: &str| is_missing(storage, run, Duration::ZERO);
        let probe = Probe::write(&shared, &run).unwrap();
        assert_eq!([&shared, &other].map(|storage| is_other(storage, &run)), [false, true]);
        assert!(is_other(&shared, "00000000"), "the probe is of an earlier run");
        // It is no checkpoint, and the first one deletes it.
        assert_eq!(begin(&fingerprint(), Some(&shared), None), (Ok(None), Vec::new()));
        Ranks::new(&shared, fingerprint(), 2, 3).write(30).unwrap();
        assert_eq!(shared.list("").unwrap().len(), 3);
        assert_eq!([&shared, &other].map(|storage| is_other(storage, &run)), [false, true]);
        probe.remove();
        let probe = Probe::write(&other, &run).unwrap();
        probe.remove();
        assert_eq!(other.list_folders("").unwrap(), []);
        assert!(
            !std::path::Path::new(other.address()).join("step-000000000000-7f3a9c21-g0").exists()
        );
    }
}

#[test]
fn a_probe_that_is_shown_late_is_waited_for_unless_the_job_stops() {
    let (_folder, storage) = folder();
    let run = fingerprint().run;
    let minute = Duration::from_secs(60);
    let stops = AtomicBool::new(true);
    assert!(!Probe::is_missing(&storage, &run, minute, &stops).unwrap());
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| is_missing(&storage, &run, minute));
        while !waits.is_finished() {
            Probe::write(&storage, &run).unwrap();
        }
        assert!(!waits.join().unwrap());
    });
}
