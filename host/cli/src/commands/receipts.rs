//! `receipts verify`: does a receipt still hold, and what is different here?

use serde_json::json;
use structures::verify::{verify, Verified};

use super::Context;
use crate::args::ReceiptsAction;
use crate::failure::Failure;

/// Exit 0 when every receipt holds, 3 when one does not, or differs under `--strict`; every file is reported.
pub fn run(action: &ReceiptsAction, cx: &Context<'_>) -> Result<u8, Failure> {
    let ReceiptsAction::Verify { files, strict } = action;
    let host = cx.host()?;
    let rows: Vec<Verified> = files
        .iter()
        .map(|file| {
            let mut row = verify(&host, file);
            if *strict && row.holds() && !row.drift.is_empty() {
                row.code = Some("env_drift".into());
                row.reason = Some(format!("{} differences", row.drift.len()));
            }
            row
        })
        .collect();
    if cx.out.json() {
        cx.out.document(json!({ "receipts": rows }));
    } else {
        rows.iter().for_each(|row| print(row, cx));
    }
    Ok(if rows.iter().all(Verified::holds) {
        0
    } else {
        3
    })
}

fn print(row: &Verified, cx: &Context<'_>) {
    let verdict = match (&row.code, &row.reason) {
        (Some(code), Some(reason)) => format!("{code}: {reason}"),
        _ if row.drift.is_empty() => "holds".into(),
        _ => "holds; made under other conditions".into(),
    };
    cx.out.line(&format!("{}: {verdict}", row.path));
    for drift in &row.drift {
        cx.out.line(&format!("  {drift}"));
    }
}
