use std::sync::Arc;

use serde_json::json;

use super::super::testing::FakeServer;
use super::*;

fn list(files: u32, path: impl Fn(u32) -> String) -> FileList {
    FileList::pack((0..files).map(|i| (path(i), 1)))
}

/// A name of 96 bytes, in the style of data pipelines.
fn long(i: u32) -> String {
    format!(
        "s3://corpus/some-project/2026-07-01T00:00:00Z/preprocessed/train/\
         part-{i:07}-of-1000000.parquet.zstd"
    )
}

async fn start() -> (Arc<FakeServer>, Anchor, AnchorWriter) {
    let (fake, cluster) = FakeServer::start();
    let metadata = json!({"name": "job", "uid": "u1", "namespace": "ns", "labels": {"team": "a"}});
    fake.put("configmaps", "job", json!({"metadata": metadata, "data": {"task": "{}"}}));
    let anchor = Anchor::new(&cluster, "job");
    let writer = AnchorWriter::begin(&anchor, &anchor.read().await.unwrap(), 1).await.unwrap();
    (fake, anchor, writer)
}

async fn load_again(anchor: &Anchor, mark: DatasetFingerprint) -> Result<FileList, LoadError> {
    let data = anchor.read().await.unwrap().data.unwrap();
    load(anchor, ("job", "u1"), &data, mark).await
}

fn parts(fake: &FakeServer) -> Vec<String> {
    let name = |object: &serde_json::Value| object["metadata"]["name"].as_str().unwrap().to_owned();
    fake.state().all("configmaps").iter().map(name).filter(|name| name != "job").collect()
}

#[tokio::test]
async fn fifteen_thousand_long_paths_fit_into_the_anchor() {
    let (fake, anchor, writer) = start().await;
    let list = list(15_000, long);
    assert!(list.bytes() > 1 << 20);
    store(&writer, &list).await.unwrap();
    assert_eq!(parts(&fake), Vec::<String>::new());
    assert_eq!(load_again(&anchor, DatasetFingerprint::of(&list)).await.unwrap(), list);
}

#[tokio::test]
async fn very_many_long_paths_are_stored_in_a_few_objects_that_the_anchor_owns() {
    let (fake, anchor, writer) = start().await;
    // Names that are independent of each other do not compress.
    let hash = |i: u32| u64::from(i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let list = list(150_000, |i| format!("{}/{:016x}", long(i), hash(i)));
    assert!(list.packed().len() > PART_BYTES, "{list:?}");
    store(&writer, &list).await.unwrap();
    let names = parts(&fake);
    assert_eq!(names.len(), list.packed().len().div_ceil(PART_BYTES));
    for name in &names {
        let part = fake.state().object("configmaps", name).unwrap();
        let metadata = &part["metadata"];
        assert_eq!(
            (&metadata["ownerReferences"][0]["uid"], &metadata["labels"]["elasticdl/role"]),
            (&"u1".into(), &"files".into())
        );
    }
    let mark = DatasetFingerprint::of(&list);
    assert_eq!(load_again(&anchor, mark).await.unwrap(), list);
    // A repetition, as after a lost answer, uses the same objects.
    store(&writer, &list).await.unwrap();
    assert_eq!(parts(&fake), names);
    fake.remove_config_map(&names[1]);
    let error = load_again(&anchor, mark).await.unwrap_err().to_string();
    assert!(error.contains("ConfigMap job-files-") && error.contains("is missing"), "{error}");
}

#[tokio::test]
async fn a_list_other_than_the_jobs_is_refused() {
    let (_fake, anchor, writer) = start().await;
    let (ours, theirs) = (list(10, long), list(11, long));
    let error = load_again(&anchor, DatasetFingerprint::of(&ours)).await.unwrap_err().to_string();
    assert!(error.contains("is missing"), "{error}");
    store(&writer, &theirs).await.unwrap();
    let error = load_again(&anchor, DatasetFingerprint::of(&ours)).await.unwrap_err().to_string();
    assert!(error.contains("is not the one that the job was started with"), "{error}");
    writer.write(&Data::from([(FILES.into(), "{\"packed\":\"AAAA\"}".into())])).await.unwrap();
    assert!(load_again(&anchor, DatasetFingerprint::of(&ours)).await.is_err());
}

#[tokio::test]
async fn a_missing_permission_to_create_a_part_is_named_in_the_error() {
    let (fake, _anchor, writer) = start().await;
    let list = list(60_000, |i| {
        format!("{:08x}{:08x}", i.wrapping_mul(0x9e37_79b9), i.wrapping_mul(0x85eb_ca6b))
    });
    assert!(list.packed().len() > WHOLE_BYTES_MAX);
    fake.state().throttles.push_back(("POST configmaps", 403, 0));
    let Err(WriteError::Retryable(error)) = store(&writer, &list).await else {
        panic!("it was accepted")
    };
    assert!(error.to_string().contains("manifests/rbac.yaml"), "{error}");
    store(&writer, &list).await.unwrap();
}
