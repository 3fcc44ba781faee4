import typer

from site_agent.bench_quality.command import quality

if __name__ == "__main__":
    typer.run(quality)
