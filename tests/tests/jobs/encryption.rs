//! An observer of the network sees nothing of the model in plain.

use elasticdl_proto::WorkerId;
use elasticdl_tests::{Command, Ended, Network, Observed, counting_data, send};
use rustix::process::Signal;

use crate::PROGRAMS;

const RECORDS: u64 = 1500;
const EPOCHS: u64 = 2;
/// The master's host. The nth launch is on host n.
const MASTER: u8 = 0;
const WORKERS: u8 = 3;

/// Bytes that the observer looks for.
fn patterns() -> Vec<Vec<u8>> {
    // The header of an all-reduce's frame.
    let frame = [b"EDL2", &2_u32.to_le_bytes()[..]].concat();
    // The header of a part of the state.
    let state = [b"EDLP", &5_u32.to_le_bytes()[..]].concat();
    // Neighbouring records are trained equally often, and most not at all in one step.
    let parameters = bytes_of(&[1.0; 4]);
    let gradients = vec![0; 256];
    // The first bytes of gRPC without TLS.
    let grpc = b"PRI * HTTP/2.0".to_vec();
    vec![frame, state, parameters, gradients, grpc]
}

fn bytes_of(floats: &[f32]) -> Vec<u8> {
    floats.iter().flat_map(|float| float.to_le_bytes()).collect()
}

/// Runs a job, a worker of which is lost and replaced: the replacement fetches the state. Returns
/// how its links were protected, as well.
fn observe(option: Option<&str>) -> (Observed, String, Ended) {
    let network = Network::new(WORKERS + 2);
    let folder = tempfile::tempdir().unwrap();
    counting_data(&folder.path().join("data"), RECORDS, 3).unwrap();
    let script = network.on_the_launchs_host();
    let program = ["/bin/sh", "-c", &script, "sh", PROGRAMS.counting];
    let (records, parameters) = (RECORDS.to_string(), (16 << 10).to_string());
    let options =
        ["--records", &records, "--parameters", &parameters, "--micros-per-record", "3000"];
    let elasticdl = PROGRAMS.elasticdl;
    let command =
        Command::new(elasticdl, folder.path().join("job"), program.into_iter().chain(options))
            .started_by(network.on(MASTER))
            .option("listen", network.address(MASTER))
            .option("shuffle", "none")
            .option("training-data", folder.path().join("data"))
            .option("num-epochs", EPOCHS.to_string())
            .option("num-workers", WORKERS.to_string())
            .option("global-batch-size", "24");
    let command = match option {
        Some(choice) => command.option("link-encryption", choice).option("audit", "1%"),
        None => command,
    };
    let capture = network.capture(patterns());
    let mut job = command.start();
    let status = job.wait_for("the first steps", |status| {
        status.step > 3 && status.allreduce_transport.is_some()
    });
    let transport = status.allreduce_transport.unwrap();
    send(job.workers()[&WorkerId(2)], Signal::KILL);
    job.wait_for("the replacement", |status| {
        let ids: Vec<u64> = status.members().map(|member| member.worker.0).collect();
        [1, 3, 4].iter().all(|id| ids.contains(id))
    });
    let ended = job.wait();
    ended.assert_exactly_once("observed", RECORDS, EPOCHS);
    assert_eq!(ended.lost(), [WorkerId(2)]);
    (capture.finish(), transport, ended)
}

#[test]
#[ignore = "needs root and iproute2"]
fn an_observer_sees_nothing_of_the_model_in_plain_unless_encryption_is_off() {
    let (observed, transport, _) = observe(None);
    assert_eq!(transport, "TCP, links between hosts encrypted");
    // A busy machine drops some of the packets that the observer does not take in time.
    assert!(observed.bytes > 1 << 20, "{observed:?}");
    assert_eq!(observed.packets, [0; 5], "{observed:?}");

    // The same observer, where there is something to see. The master's link is encrypted anyway.
    let (observed, transport, _) = observe(Some("off"));
    assert_eq!(transport, "TCP, links not encrypted, with digests");
    assert!(observed.packets[..4].iter().all(|packets| *packets > 0), "{observed:?}");
    assert_eq!(observed.packets[4], 0, "{observed:?}");
}
