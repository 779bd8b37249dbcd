//! The images build, and train a model in three pods.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use elasticdl_tests::cluster::text;
use elasticdl_tests::{ChildOutput, each_once};

use crate::{cluster_tests, namespace};

/// Number of rows of the sample data.
const ROWS: u64 = 3000;

/// Points of y = 2·x - 0.5, over three files in a folder that pods may read.
fn points() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    for part in 0..3 {
        let mut text = String::from("x,y\n");
        for row in (part..ROWS).step_by(3) {
            let x = f64::from(u32::try_from(row).unwrap()) / 1500.0 - 1.0;
            writeln!(text, "{x},{}", 2.0 * x - 0.5).unwrap();
        }
        fs::write(folder.path().join(format!("part-{part}.csv")), text).unwrap();
    }
    folder
}

fn the_images_train_a_model_in_three_pods() {
    let tag = std::env::var("ELASTICDL_IMAGES").expect("ELASTICDL_IMAGES is the images' tag");
    let namespace = namespace("images");
    let data = points();
    let volume = format!("host_path={},mount_path=/data,read_only=true", data.path().display());
    let (examples, elasticdl) =
        (format!("localhost/elasticdl-examples:{tag}"), format!("localhost/elasticdl:{tag}"));
    // First the examples' image alone, then with the small image for the master.
    for (job, master_image) in [("alone", &examples), ("both", &elasticdl)] {
        let options = [
            "--image",
            &examples,
            "--master-image",
            master_image,
            "--job-name",
            job,
            "--volume",
            &volume,
        ];
        let mut command = namespace.elasticdl("train", options);
        command.args(["--training-data", "/data"]);
        command.args(["--num-workers", "3", "--num-epochs", "20", "--global-batch-size", "60"]);
        command.args(["--master-resources", "cpu=10m,memory=64Mi"]);
        command.args(["--worker-resources", "cpu=10m,memory=64Mi", "--", "linear"]);
        let (code, output) = ChildOutput::start(command).wait();
        assert_eq!(code, Some(0), "{output}\n{}", namespace.master_log(job));
        let summary = namespace.summary(job).unwrap();
        assert_eq!((summary.records, summary.workers.peak), (each_once(20 * ROWS), 3));
        assert_eq!(summary.model_summary.as_deref(), Some("y = 2.0000·x + -0.5000"));
        let deleted = namespace.elasticdl("delete", [job]).output().unwrap();
        assert!(deleted.status.success(), "{}", text(&deleted));
    }
    assert_eq!(namespace.leftovers(), Vec::<String>::new());
}

cluster_tests![the_images_train_a_model_in_three_pods,];
